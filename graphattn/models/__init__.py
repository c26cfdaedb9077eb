"""Adapters: what turns a model into something the step program can run."""

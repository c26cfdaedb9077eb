"""The demo: a real model, answered, checked and timed beside transformers in one run."""

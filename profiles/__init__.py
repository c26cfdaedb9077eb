"""Benchmarks: workloads, runners, and the records they leave in results/."""

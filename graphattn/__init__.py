"""Static-shape, CUDA-graph-friendly attention runtime: one captured graph per decode step."""

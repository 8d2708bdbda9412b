"""Lightning's checkpoints: digests next to each saved one, and exact resume."""

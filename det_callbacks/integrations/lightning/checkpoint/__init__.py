"""Lightning's checkpoints: digests beside each saved one, and exact resume."""

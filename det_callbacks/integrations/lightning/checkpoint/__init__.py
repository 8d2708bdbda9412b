"""Lightning's checkpoints: digests beside each that is saved, and exact resume."""

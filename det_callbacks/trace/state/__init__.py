"""Records state, batches, generators and optimizers by name."""

"""State, batches, generators and optimizers: what is recorded by its name."""

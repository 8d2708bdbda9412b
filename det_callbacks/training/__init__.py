"""Records, verifies or audits the run of a training, independent of its framework."""

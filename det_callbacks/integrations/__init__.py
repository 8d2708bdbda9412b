"""The ways in: who calls a run when, and where each framework keeps what a run has to know of its training."""

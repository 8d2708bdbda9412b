"""What a run of a training is, whatever drives it: recording, verifying and auditing. Knows no framework."""

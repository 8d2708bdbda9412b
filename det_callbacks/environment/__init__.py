"""What of this process and this machine can change the bits of a run: what is installed, in force, and drawn from."""

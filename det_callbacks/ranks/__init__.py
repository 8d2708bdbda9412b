"""What the processes of one run tell each other."""

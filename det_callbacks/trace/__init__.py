"""Records what a step did: its program and digests."""

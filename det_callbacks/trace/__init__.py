"""What a step did: programs, digests, and the run folder they are kept in."""

"""By how much two modules differ that are meant to compute the same: eager and compiled, one and two threads."""

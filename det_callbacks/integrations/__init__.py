"""The ways in: each calls a run when its framework trains."""

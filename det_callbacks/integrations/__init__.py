"""The integrations: each calls a run when its framework trains."""

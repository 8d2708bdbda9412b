"""Who an op belongs to: its phase, its module, its lines, and the names of tensors."""

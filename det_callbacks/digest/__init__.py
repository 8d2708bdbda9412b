"""tensor -> 64 bits."""

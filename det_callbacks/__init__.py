"""det_callbacks."""

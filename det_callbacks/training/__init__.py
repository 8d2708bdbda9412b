"""A run of a training, whatever framework drives it: recorded, verified or audited."""

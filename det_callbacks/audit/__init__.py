"""Each op twice: which ops give other bits when they are run again on the same inputs, and what was found."""

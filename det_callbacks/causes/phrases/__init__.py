"""What several rules say: the place in the run, a site, what entered a step, a generator, a batch, a choice."""

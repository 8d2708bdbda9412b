"""Records, verifies or audits a run, independent of the framework that trains."""

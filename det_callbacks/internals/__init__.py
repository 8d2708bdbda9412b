"""Every private name of torch and Lightning that the package uses: what for, and what is lost without it."""

"""The private names of torch and Lightning that the package uses, each with its purpose."""

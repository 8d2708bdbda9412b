"""What one op does: what it reads and writes, and the sites that it adds."""

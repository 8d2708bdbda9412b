"""What is known of ops before they run."""

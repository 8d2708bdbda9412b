"""What a person reads: verdicts, runs, closing lines and the HTML page."""

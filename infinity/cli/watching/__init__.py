"""Shows the status of runs as text."""

"""What `infinity bench-io` does."""

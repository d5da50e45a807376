"""What `infinity train` is made of: models by name, text, the loop, and what it shows."""

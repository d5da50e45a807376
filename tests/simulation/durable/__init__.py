"""A search of what a crash leaves on the drives, over every order of durable operations; see docs/simulation.md."""

"""What a run is doing, as text."""

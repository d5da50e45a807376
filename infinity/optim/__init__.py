"""Optimizer states and their formats, the tile pipeline, and learning-rate schedules."""

"""Reads the log of a run, and sums it up as numbers and as a page."""

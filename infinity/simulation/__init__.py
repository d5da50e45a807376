"""Runs the scheduler in virtual time with hostile completion orders, failures and crashes; see docs/simulation.md."""

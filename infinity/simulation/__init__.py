"""The scheduler in virtual time, under hostile orders of completions, failures and crashes; see docs/simulation.md."""

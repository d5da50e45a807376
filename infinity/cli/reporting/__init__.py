"""What a run was, from its log."""

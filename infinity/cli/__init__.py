"""The `infinity` command: one file a sub-command."""

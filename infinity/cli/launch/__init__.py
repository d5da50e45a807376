"""Scripts that commands start as processes. They have a directory of their own: Python puts it first on its path."""

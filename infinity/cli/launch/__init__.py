"""Scripts that commands start as processes. They have their own directory, which Python puts first on its path."""

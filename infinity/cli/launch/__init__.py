"""Holds the scripts that processes of commands start with: Python puts a script's directory first on its path."""

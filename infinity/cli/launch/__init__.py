"""Holds the script that ranks start with, alone: Python puts a script's directory first on its path."""

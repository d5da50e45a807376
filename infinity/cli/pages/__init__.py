"""Self-contained pages of HTML: they need no other file, script or network."""

"""Pages of HTML that need nothing else: no other file, no script, no network."""

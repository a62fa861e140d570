"""Which runs there are: listed, found by their names and folders, deleted. No server, no database."""

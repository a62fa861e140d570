"""The command line: commands, options, and the printing of results."""

"""The command line: Typer, exit statuses, rendering."""

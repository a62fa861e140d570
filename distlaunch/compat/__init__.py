"""What takes the place of other launchers: their flags and files, read into jobs of ours."""

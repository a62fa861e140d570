"""Who sees a run: its folder, the terminal, whoever else wants to. None knows of another."""

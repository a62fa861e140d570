"""Who sees a run: its folder, the terminal, others; and how that is written without holding it up."""

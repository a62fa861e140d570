"""IO without policy: the job file, links to agents, the run folder, the terminal."""

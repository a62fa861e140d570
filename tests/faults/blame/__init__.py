"""Whether a launcher names the rank that really failed first: scripts that fail, and what is said of them."""

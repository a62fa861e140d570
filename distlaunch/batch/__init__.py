"""Jobs for a queue: the script that a scheduler runs, and what its queue says of them."""

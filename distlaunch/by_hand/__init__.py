"""Nodes whose launchers were started by hand, one on each: they meet, and one's failure ends the others."""

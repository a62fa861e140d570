"""The bundle sent to a node: stdlib only, Python 3.8 and later, importing nothing else of distlaunch."""

"""A thousand nodes without processes: what the controller itself costs."""

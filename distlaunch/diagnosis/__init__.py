"""The diagnosis of a worker's failure by its status, last output and error record, with advice. Pure."""

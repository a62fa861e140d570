"""The diagnosis of a worker's failure from its status, last output and error record, with advice. Pure."""

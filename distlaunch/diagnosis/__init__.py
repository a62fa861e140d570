"""Why a worker failed, by its status, last output and error record, and what to do about it. Pure."""

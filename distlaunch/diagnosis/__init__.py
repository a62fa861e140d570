"""Why a worker failed, from its status, its last output and its error record, and what to do about it. Pure."""

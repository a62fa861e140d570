"""Why a worker ended: what its exit status and its last words tell, and what to do about it. Pure."""

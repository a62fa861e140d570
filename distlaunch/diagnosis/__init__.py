"""Why a worker, and so a run, ended: what statuses and last words tell, what to do, the summary. Pure."""

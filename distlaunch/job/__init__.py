"""The job file: `build.py` turns a document (`document.py`) into a frozen `JobSpec` (`spec.py`).

This package is pure. `cli/job_file.py` reads the file. `keys.py` declares the keys, and `types.py` their
types. `nodes.py` determines the hosts, and `checks.py` finds mistakes that involve several keys.
"""

"""The job file: `build.py` turns a document (`document.py`) into a frozen `JobSpec` (`spec.py`).

All modules are pure, except for `file.py` and `yaml_document.py`, which read files. `keys.py` declares the
keys, `types.py` their types. `nodes.py` determines the hosts, and `checks.py` finds mistakes that involve
several keys.
"""

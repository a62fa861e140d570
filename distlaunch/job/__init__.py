"""The job file: `build.py` turns a document (`document.py`) into a frozen `JobSpec` (`spec.py`).

Everything but `file.py` and `yaml_document.py`, which read files, is pure. `keys.py` declares the keys,
`types.py` their types. `nodes.py` finds the hosts, and `checks.py` finds mistakes that involve several keys.
"""

"""The job file: a document (`document.py`) becomes a frozen `JobSpec` (`spec.py`) by `build.py`. Pure.

`fields.py` and `container_fields.py` declare its keys, `types.py` what each may be; `nodes.py` finds the
hosts, `checks.py` the mistakes across keys.
"""

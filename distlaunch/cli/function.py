"""Calls a function as a rank: `python -c SOURCE CALL…`, where CALL is packed by `distlaunch.api.call`.

The job's Python runs this on each node. It needs only the standard library of Python 3.8. The last line on
stdout is MARK and the packed result.
"""

import base64
import importlib
import os
import pickle
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARK = "\x1edistlaunch result "
MAX_RESULT = 64 << 20
"""Maximum bytes of a packed result."""


def main() -> None:
    """Call the function, and print its result.

    The call is (Python version, module, name, arguments), pickled by `distlaunch.api`. Without a module, the
    name is the pickled function.
    """
    packed = zlib.decompress(base64.b64decode("".join(sys.argv[1:])))
    version, module, name, arguments = pickle.loads(packed)  # noqa: S301 (from the user's own program)
    here = sys.version_info[:2]
    if module is None and here != version:
        needed, own = (".".join(map(str, each)) for each in (version, here))
        sys.exit(
            f"a function from a notebook or __main__ needs the same version of Python: {needed}, not {own}"
        )
    args, kwargs = pickle.loads(arguments)  # noqa: S301
    function: Any = pickle.loads(name) if module is None else importlib.import_module(module)  # noqa: S301
    for part in name.split(".") if module is not None else ():
        function = getattr(function, part)
    result = base64.b64encode(zlib.compress(pickle.dumps(function(*args, **kwargs)), 1))
    if len(result) > MAX_RESULT:
        sys.exit(f"the result is too large: {len(result)} bytes (at most {MAX_RESULT}); write it to a file")
    sys.stdout.flush()
    data = b"\n" + MARK.encode() + result + b"\n"
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()

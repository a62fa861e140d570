"""The texts of workers: all say that they are ready; some resist SIGTERM, and some leave daemons."""

import textwrap

_OPENING = '''
import os, signal, sys, time
RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def earlier():
    """How many processes of this run are there that are not of this attempt."""
    names = "DISTLAUNCH_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    run, own = (f"{name}={os.environ[name]}\\0" for name in names)
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = open(f"/proc/{pid}/environ", errors="replace").read()
        except OSError:
            continue
        found += run in environ and own not in environ
    return found
def ready(rank=RANK):
    line = f"ready {rank} {os.getpid()} beside {earlier()} of attempt {ATTEMPT}\\n"
    os.write(1, line.encode())
def resist():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def wait():
    while True:
        signal.pause()
def daemon(says=ready):
    """Two forks and a session away, and resists; it ends by itself if nobody ends it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.alarm(120)
            resist()
            says(100 + int(RANK))
            wait()
        os._exit(0)
    os.wait()
'''


def worker(does: str) -> str:
    """The text of a worker that may call the functions above."""
    return f"{_OPENING}\n\n{textwrap.dedent(does)}\n"


SLEEPER = worker("ready()\nwait()")
STUBBORN = worker("resist()\nready()\nwait()")
DAEMONS = worker("daemon()\nready()\nwait()")
"""Each daemon says that it is ready, too, as a rank of 100 more than its worker's."""

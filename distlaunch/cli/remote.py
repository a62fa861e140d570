"""Runs commands on another machine over SSH. distlaunch itself is sent along unless cached on that machine.

The commands are `run --on HOST` and `submit --on HOST`, after which this machine may sleep, and those for
runs on that machine.
"""

import base64
import json
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.cli.job_file import job_of, read_job, read_text
from distlaunch.cli.output import print_raw, print_run, print_text, say
from distlaunch.cli.own_archive import payload, payload_key
from distlaunch.errors import DistlaunchError, Exit, UsageError
from distlaunch.here import TERMINALS
from distlaunch.job.document import flow_text
from distlaunch.job.spec import JobSpec
from distlaunch.observers.run_list import note_end_seen, note_way
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import SshOptions

NO_PYTHON = 95
"""Exit status of the remote shell if Python is missing or too old."""
WAS_255 = 94
"""Exit status of the remote command instead of 255, with which ssh itself exits if the connection fails."""
NOT_OF_THE_RUN = 93
"""Exit status of the remote command instead of 1 if it crashed, or failed to follow a run: not the run's."""
_START_UP = "the start-up files of the shell there must not exit, read standard input or start another shell"
_FIND_PYTHON = (
    "for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do "
    'if "$p" -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null; then break; fi; p=; done; '
    f'[ -n "$p" ] || exit {NO_PYTHON}; '
)
_SHELL = """exec /bin/sh -c 'read -r line; case "$line" in "for p in "*) eval "$line" ;; esac'"""
"""A shell that reads one line from stdin, so that the login shell's quoting doesn't matter.

If a start-up file has read that line, the next one contains data, which must not be executed.
"""
ANSWER_S = 120.0
"""Seconds until distlaunch must have started on the other machine. ssh may ask for a password before that."""
_READY = re.compile(rb"\0distlaunch: (have|need)\n")
"""The first output of the remote program, after any output of shell start-up files."""
_PLACE = """
import os, sys
sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(NOT_OF_THE_RUN))
cache = os.environ.get("XDG_CACHE_HOME", "")
top = os.path.join(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "distlaunch")
home = os.path.join(top, {key!r})
""".replace("NOT_OF_THE_RUN", str(NOT_OF_THE_RUN))
_RECEIVE = """
import contextlib, io, json, shutil, signal, stat, tempfile, threading, time, zipfile
os.makedirs(top, 0o700, exist_ok=True)
kept = os.lstat(top)  # the program in it is executed
if not stat.S_ISDIR(kept.st_mode) or kept.st_uid != os.getuid() or kept.st_mode & 0o022:
    sys.stderr.write("distlaunch: %s must be a directory that only you can write to; remove it\\n" % top)
    os._exit(NOT_OF_THE_RUN)
caller = os.fdopen(os.dup(0), "rb")
request = json.loads(caller.readline())
if os.path.isdir(home):
    os.utime(home)
    os.write(1, b"\\0distlaunch: have\\n")
else:
    os.write(1, b"\\0distlaunch: need\\n")
    program = zipfile.ZipFile(io.BytesIO(caller.read(int(caller.readline()))))
    fresh = tempfile.mkdtemp(dir=top)
    program.extractall(fresh)
    try:
        os.rename(fresh, home)
    except OSError:
        shutil.rmtree(fresh)
    for other in os.scandir(top):  # versions not used for a year: queued jobs start from theirs
        with contextlib.suppress(FileNotFoundError):  # another command has removed it
            if other.stat().st_mtime < time.time() - 365 * 86400:
                shutil.rmtree(other.path, ignore_errors=True)
os.environ.update(request["env"])
if request["directory"]:
    try:
        os.chdir(request["directory"])
    except OSError as error:
        words = (request["directory"], request["host"], error.strerror)
        rest = "; --on needs the job file's directory at the same path on that host"
        sys.stderr.write("distlaunch: %s on %s: %s" % words + rest + "\\n")
        os._exit(2)
with tempfile.TemporaryFile() as file:
    file.write(request["stdin"].encode())
    file.seek(0)
    os.dup2(file.fileno(), 0)
def leave_with_the_caller():
    while os.read(caller.fileno(), 4096): pass
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # so that it stops what it has started
    time.sleep(60)
    os._exit(129)
threading.Thread(target=leave_with_the_caller, daemon=True).start()
words = request["words"]
""".replace("NOT_OF_THE_RUN", str(NOT_OF_THE_RUN))
_START = """
sys.path.insert(0, home)
sys.argv = ["distlaunch", *words]
leave = os._exit
os._exit = lambda status: leave(WAS_255 if status == 255 else status)
from distlaunch.__main__ import main
from distlaunch.errors import DistlaunchError
if words[0] in ("attach", "wait"):
    DistlaunchError.exit_status = NOT_OF_THE_RUN
main()
""".replace("WAS_255", str(WAS_255)).replace("NOT_OF_THE_RUN", str(NOT_OF_THE_RUN))
"""Programs for the other machine: `_PLACE` names the cache for distlaunch there; `_RECEIVE` reads the request
and, unless it is cached, distlaunch; `_START` runs distlaunch."""


class Request(Frozen):
    """A command line for another machine. An empty `directory` is the user's home; `env` adds variables."""

    words: tuple[str, ...]
    directory: str = ""
    stdin: str = ""
    env: Mapping[str, str] = {}


def ssh_to(host: str, config: str | None, port: int | None = None, words: Sequence[str] = ()) -> Ssh:
    """Return the SSH transport to a host, given as HOST or USER@HOST; `words` are options of ssh."""
    user, _, name = host.rpartition("@")
    return Ssh(name, user or None, port, SshOptions(config, tuple(words)))


def run_there(
    ssh: Ssh,
    request: Request,
    show: Callable[[bytes], object] = print_raw,
    name: str = "",
    runs: bool = False,
) -> int:
    """Run the command remotely; return its exit status. Its stdout goes to `show`, by default local stdout.

    With the `name` of a run, Ctrl-C and a lost connection print that the run is not stopped, and if it `runs`
    for certain, so does a connection that fails. Raises `DistlaunchError`.
    """
    if show is print_raw:  # escaping must be done by lines, so it is done there
        shown = "".join(str(fd) for fd in (1, 2) if os.isatty(fd))
        request = request._replace(env={**request.env, TERMINALS: shown})
    argv = ssh.argv_for(_SHELL)
    began = False
    # Otherwise, the list of runs contains the configuration.
    config = _config_words(ssh) if ":" in name else ()
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            began, output = _hand_over(process, ssh.host, request)
            while output:
                show(output)
                output = _read(process)
        except BrokenPipeError:
            pass  # the exit status shows why the process ended
        except BaseException as error:
            process.kill()
            if name and isinstance(error, KeyboardInterrupt):
                stop = shlex.join(["distlaunch", "stop", *config, name])
                say(f"detached from {name} without stopping it; `{stop}` stops it")
            raise
    if name and (began or runs) and process.returncode == 255:
        attach = shlex.join(["distlaunch", "attach", *config, name])
        say(f"the SSH connection to {ssh.host} was lost, which doesn't stop {name}; to continue: {attach}")
        return Exit.UNREACHABLE
    return _status(ssh, process.returncode, began)


def show_there(ssh: Ssh, words: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command remotely on this terminal; return its exit status. Raises `DistlaunchError`."""
    if status := run_there(ssh, Request(("--version",)), lambda output: None):
        return status
    code = f"{_PLACE.format(key=payload_key())}words = {[*words]!r}\nos.environ.update({env!r})" + _START
    encoded = base64.b64encode(code.encode()).decode()  # free of characters that are special in any shell
    run = f'exec "$p" -I -c "import base64,sys;exec(base64.b64decode(sys.argv.pop()))" {encoded}'
    start = f"exec /bin/sh -c '{_FIND_PYTHON}{run}'"
    return _status(ssh, subprocess.run(ssh.argv_for(start, terminal=True), check=False).returncode, True)


def _hand_over(process: "subprocess.Popen[bytes]", host: str, request: Request) -> tuple[bool, bytes]:
    """Send the command, and the program unless it is cached. Return if it began, and its first output."""
    assert process.stdin is not None
    assert process.stdout is not None
    code = _PLACE.format(key=payload_key()) + _RECEIVE + _START
    start = _FIND_PYTHON + f'exec "$p" -I -c {shlex.quote(f"exec({code!r})")}'
    fields = {"host": host, **request._asdict()}
    process.stdin.write(f"{start}\n{json.dumps(fields)}\n".encode())
    output = b""
    deadline = time.monotonic() + ANSWER_S
    while not (ready := _READY.search(output)):
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise DistlaunchError(f"distlaunch did not start on {host} within {ANSWER_S:g} s; {_START_UP}")
        if not (piece := _read(process)):
            return False, output
        output += piece
    if ready[1] == b"need":
        data = payload()
        process.stdin.write(b"%d\n" % len(data) + data)
    return True, output[ready.end() :] or _read(process)


def _read(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1 << 16)


def _config_words(ssh: Ssh) -> tuple[str, ...]:
    """Return the option with which other commands reach the host in the same way."""
    return ("--ssh-config", ssh.options.config) if ssh.options.config else ()


def _status(ssh: Ssh, status: int, began: bool) -> int:
    """Return the exit status of a command run over SSH.

    Raises `DistlaunchError` if Python is missing, or if the command failed to follow a run.
    """
    if status == NO_PYTHON and not began:
        raise DistlaunchError(
            f"{ssh.host}: found no Python 3.10 or later (tried python3 and python3.10 to python3.14 in the "
            "PATH of SSH commands); install one there, or add it to that PATH"
        )
    if status == NOT_OF_THE_RUN:
        raise DistlaunchError  # it has printed the reason
    if not began and 0 <= status < 255:
        say(f"{ssh.host}: the shell there ended before it started distlaunch (status {status}); {_START_UP}")
        return Exit.UNREACHABLE
    if status == 255 and began:
        ps = shlex.join(["distlaunch", "ps", "-a", *_config_words(ssh), f"{ssh.host}:"])
        what = f"the SSH connection to {ssh.host} was lost, and the command may have been carried out"
        say(f"{what}; `{ps}` shows the runs there")
        return Exit.UNREACHABLE
    if status == 255:
        plain = shlex.join(ssh.plain_argv)
        direct = plain.replace("ssh", "ssh -o BatchMode=yes -o ControlPath=none", 1)
        what = f"the SSH connection to {ssh.host} failed for the reason that ssh gives above"
        denied = f"`{direct} true` must work: if permission is denied, load your key with ssh-add"
        say(f"{what}; {denied}; if the host's key is new, check it once with `{plain}`")
        return Exit.UNREACHABLE
    return 255 if status == WAS_255 else status if status >= 0 else 128 - status


def run_on(
    host: str,
    job: str,
    spec: JobSpec,
    options: Sequence[str],
    overrides: Sequence[str],
    args: Sequence[str],
    detach: bool,
) -> int:
    """Start the job remotely, as `--detach` does. Unless `detach`, attach to it. Return the exit status.

    `spec` is the job as parsed on this machine, with the `options` of `run`. Raises `DistlaunchError`.
    """
    ssh = _way_to(host, spec)
    status, text = _output_of(ssh, ("run", "-", "--detach", *options), job, spec, overrides, args)
    run = text.strip()
    if status or not run:
        return status
    name = f"{ssh.user}@{ssh.host}" if ssh.user else ssh.host
    way = (name, ssh.options.config, ssh.port, ssh.options.words)
    note_way(run, spec.name, spec.invocation.file, way, spec.logs.directory)
    if detach:
        print_run(run)
        if sys.stderr.isatty():
            say(f"running, controlled from {host}; follow it with `distlaunch attach {run}`")
        return Exit.OK
    status = run_there(ssh, Request(("attach", "--all", run)), name=run, runs=True)
    return note_end_seen("attach", run, status)


def submit_on(
    host: str, config: str | None, job: str, overrides: Sequence[str], args: Sequence[str], to: Sequence[str]
) -> int:
    """Submit the job remotely with the options `to`; return the exit status. Raises `DistlaunchError`."""
    spec = job_of(read_job(job), job, overrides, args, submitted=True)
    config = config or spec.ssh.config
    ssh, waits = ssh_to(host, config), "--wait" in to and not {"--json", "--dry-run"} & {*to}
    # Otherwise, the ID would be printed only at the end.
    words = [word for word in to if word != "--wait"] if waits else to
    status, text = _output_of(ssh, ("submit", "-", *words), job, spec, overrides, args)
    queued = len(text.split()) == 1
    print_text(f"{host}:{text}" if queued else text)
    if status == Exit.OK and queued and waits:
        return run_there(ssh, Request(("wait", text.strip())), name=f"{host}:{text.strip()}", runs=True)
    if status == Exit.OK and queued and sys.stderr.isatty():
        option = f" --ssh-config {shlex.quote(config)}" if config else ""
        say(f"submitted on {host}; follow it with `distlaunch attach{option} {host}:{text.strip()}`")
    return status


def _way_to(host: str, spec: JobSpec) -> Ssh:
    """Return the transport to the job's node with that name, or else a transport with the job's options."""
    same = (node.reach for node in spec.pool if isinstance(node.reach, Ssh) and node.reach.host == host)
    return next(same, ssh_to(host, None)._replace(options=spec.ssh))


def _output_of(
    ssh: Ssh, command: Sequence[str], job: str, spec: JobSpec, overrides: Sequence[str], args: Sequence[str]
) -> tuple[int, str]:
    """Run a command for the job remotely; return its exit status and its output."""
    if not spec.invocation.file:
        raise UsageError("--on needs a job file; write one with `distlaunch dry-run --save job.yaml …`")
    named = [f"name={flow_text(spec.name)}", *overrides]
    words = [*command, *(word for one in named for word in ("--set", one)), *(["--", *args] if args else [])]
    envs = [spec.program.env, *(node.env for node in spec.pool)]  # inherited values would differ there
    inherited = {name: value.text for env in envs for name, value in env.items() if value.inherited}
    inherited["DISTLAUNCH_PYTHON"] = sys.executable
    directory, output = os.path.dirname(os.path.realpath(job)), bytearray()
    status = run_there(ssh, Request(tuple(words), directory, read_text(job), inherited), output.extend)
    return status, output.decode(errors="replace")

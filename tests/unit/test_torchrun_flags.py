"""torchrun's command line: spellings, variables, mistakes, and the job that it becomes."""

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.compat.flags import FLAGS, Flag, Flags, parse_flags
from distlaunch.compat.torchrun_job import Here, flag_messages, gathering_of, job_of, left_to_torch
from distlaunch.errors import UsageError
from distlaunch.job.spec import JobSpec, TorchrunLogs
from tests.unit.samples import bounded

DOCUMENT = Path(__file__).parents[2] / "docs" / "torchrun.md"
VALUES = {
    "rdzv_conf": "a=b",
    "start_method": "fork",
    "numa_binding": "socket",
    "redirects": "1",
    "tee": "0:1,12:3",
}
VALUED = [flag for flag in FLAGS if flag.kind is not bool]


def here_with(gpus: int = 0, environ: Mapping[str, str] | None = None) -> Here:
    """A machine of eight cores."""
    return Here("/work", "host", "/usr/bin/python3", ("/var/tmp", "/dev/shm"), gpus, 8, environ or {})


def spellings(flag: Flag) -> list[str]:
    return ["--" + flag.field.replace("_", separator) for separator in "-_"]


def parsed(*words: str, **environ: str) -> Flags:
    return parse_flags(words, environ)


def job(*words: str, gpus: int = 0, **environ: str) -> JobSpec:
    """The job of flags before `s.py`."""
    return job_of(parse_flags((*words, "s.py"), environ), here_with(gpus, environ))


def sample(flag: Flag) -> tuple[str, Any]:
    """A good value for a flag, as text and as it is read."""
    text = VALUES.get(flag.field) or {str: "word", int: "7", float: "2.5"}[flag.kind]
    return text, flag.kind(text)


def read(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Do all that is done with a command line before a job starts."""
    flags = parse_flags(words, environ)
    if not flags.help:
        flag_messages(flags)
        left_to_torch(flags, environ)
        job_of(flags, here_with(environ=environ))
        if flags.nodes[1] > 1:
            gathering_of(flags, "host", environ)


def refusal(*words: str, **environ: str) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(UsageError) as caught:
        read(words, environ)
    (line,) = str(caught.value).split("\n")
    assert line
    return line


# Spellings


@pytest.mark.parametrize("flag", VALUED, ids=lambda flag: flag.field)
def test_a_value_follows_in_every_spelling(flag: Flag) -> None:
    text, value = sample(flag)
    for words in [each for name in spellings(flag) for each in ([f"{name}={text}"], [name, text])]:
        flags = parsed(*words, "s.py", "x")
        assert getattr(flags, flag.field) == value and flags.given == {flag.field}
        assert (flags.script, flags.args) == ("s.py", ("x",))
    for rest in ((), ("--standalone", "s.py"), ("--", "s.py")):
        assert refusal(flag.name, *rest) == f"{flag.name} needs a value"


@pytest.mark.parametrize("flag", [each for each in FLAGS if each not in VALUED], ids=lambda flag: flag.field)
def test_a_switch_takes_no_value(flag: Flag) -> None:
    for name in spellings(flag):
        assert getattr(parsed(name, "s.py"), flag.field) is True
        assert refusal(f"{name}=1", "s.py") == f"{flag.name} takes no value"


@pytest.mark.parametrize("flag", VALUED, ids=lambda flag: flag.field)
def test_a_beginning_is_taken_if_it_is_unique(flag: Flag) -> None:
    text, value = sample(flag)
    for length in range(1, len(flag.field) + 1):
        meant = [other.name for other in FLAGS if other.field.startswith(flag.field[:length])]
        name = "--" + flag.field[:length].replace("_", "-")
        if len(meant) == 1 or name == flag.name:
            assert getattr(parsed(f"{name}={text}", "s.py"), flag.field) == value
        else:
            assert refusal(f"{name}={text}", "s.py") == f"{name} could mean {', '.join(meant)}"


def test_letters_can_be_combined() -> None:
    for words in (["-r", "3"], ["-r3"], ["-r=3"]):
        assert parsed(*words, "s.py").redirects == "3"
    for words in (["-t", "0:1"], ["-t0:1"], ["-t=0:1"]):
        assert parsed(*words, "s.py").tee == "0:1"
    assert parsed("-m", "pkg").module
    flags = parsed("-mr3", "-t1", "pkg")
    assert (flags.module, flags.redirects, flags.tee, flags.script) == (True, "3", "1", "pkg")


def test_help_may_follow_values_and_needs_no_script() -> None:
    for words in (["-h"], ["--nproc-per-node", "2", "--help"], ["--nproc-per-node", "2", "-h", "s.py"]):
        assert parsed(*words).help
    assert not parsed("s.py", "-h").help


# Variables


@pytest.mark.parametrize(
    "flag", [each for each in FLAGS if each.from_environment], ids=lambda flag: flag.field
)
def test_a_variable_is_the_default(flag: Flag) -> None:
    name = f"PET_{flag.field.upper()}"
    text, value = ("1", True) if flag.kind is bool else sample(flag)
    flags = parsed("s.py", **{name: text})
    assert getattr(flags, flag.field) == value
    assert flags.given == {flag.field}


def test_the_command_line_overrides_variables() -> None:
    assert refusal("s.py", PET_MAX_RESTARTS="x") == "PET_MAX_RESTARTS: expected a whole number, got 'x'"
    assert refusal("s.py", PET_TEE="x").startswith("PET_TEE: expected 0 (nothing)")
    flags = parsed("--max-restarts=2", "--role=-b", "s.py", PET_MAX_RESTARTS="x", PET_ROLE="a")
    assert (flags.max_restarts, flags.role) == (2, "-b")


def test_a_switch_is_off_with_0_and_on_with_1() -> None:
    for text in ("0", "", "false", "False"):
        assert parsed("s.py", PET_MODULE=text) == Flags(script="s.py")
    assert parsed("s.py", PET_MODULE="1", PET_STANDALONE="true").standalone


def test_some_flags_have_no_variable() -> None:
    without = {"logs_specs", "numa_binding", "print_completion", "help"}
    assert {flag.field for flag in FLAGS if not flag.from_environment} == without
    environ = {f"PET_{field.upper()}": "1" for field in without}
    assert parsed("s.py", **environ) == Flags(script="s.py")


# What follows the flags

NAMES = st.sampled_from([word for flag in FLAGS for word in (flag.name, flag.name[:6])])


@bounded()
@given(
    st.lists(st.text().filter(lambda word: "\0" not in word) | NAMES),
    st.sampled_from(["train.py", "./-x", "dir/s.py", "--"]),
)
def test_what_follows_the_script_is_not_touched(args: list[str], script: str) -> None:
    dashes = ["--"] if script == "--" or args[:1] == ["--"] else []
    flags = parse_flags(("--nproc-per-node=2", *dashes, script, *args), {})
    assert (flags.nproc_per_node, flags.script, flags.args) == ("2", script, tuple(args))
    assert job_of(flags, here_with()).program.args == tuple(args)


def test_dashes_end_the_flags_once_before_or_after_the_script() -> None:
    assert parsed("--", "--s.py", "--", "-m") == Flags(script="--s.py", args=("--", "-m"))
    assert parsed("s.py", "--", "--", "-m") == Flags(script="s.py", args=("--", "-m"))
    assert parsed("s.py", "-m", "--") == Flags(script="s.py", args=("-m", "--"))
    assert parsed("-") == Flags(script="-")
    for words in ((), ("--standalone",), ("--standalone", "--")):
        assert refusal(*words).startswith("no script given")


TEXTS = st.text(alphabet=string.printable[:95] + "²٣", max_size=6)
WORDS = st.one_of(
    st.sampled_from([flag.name for flag in FLAGS]),
    st.builds("{0.name}={1}".format, st.sampled_from(FLAGS), TEXTS),
    TEXTS,
)


@bounded()
@given(st.lists(WORDS, max_size=6))
def test_any_command_line_is_read_or_refused_in_a_line(words: list[str]) -> None:
    try:
        read(words, {})
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


# Bad values


OWN_FLAG = "(see `distlaunch torchrun --help`); put the script's own flags after the script"
ENDPOINT = "--rdzv-endpoint:"
LOOK = "check the driver, CUDA_VISIBLE_DEVICES, and the GPUs of the job or container; on a CPU node, pass"
UNKNOWN = ["4", "-1", "x", "0:4", "0:1,", "a:1", "0:1:2", ":"]
STREAMS = "0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or rank:N,…"
INSTEAD = "use --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
PORT, NUMBER = "a port from 1 to 65535", "a number ≥ 0"


BAD_VALUES = [
    ("--nnodes", ["two", "2:20:30", "0", "3:2"], "N or MIN:MAX with 1 ≤ MIN ≤ MAX"),
    ("--nproc-per-node", ["unknown", "0", "²", ""], "a number ≥ 1, auto, cpu or gpu"),
    ("--max-restarts", ["1.5"], "a whole number"),
    *((f"--{name}", ["-1"], NUMBER) for name in ("max-restarts", "node-rank", "shutdown-timeout")),
    ("--monitor-interval", ["nan"], NUMBER),
    ("--start-method", ["thread"], "spawn, fork or forkserver"),
    ("--numa-binding", ["x"], "node, socket, exclusive or core-complex"),
    ("--local-ranks-filter", ["a"], 'ranks such as "0,2"'),
    *((name, UNKNOWN, STREAMS) for name in ("--redirects", "--tee")),
    ("--master-port", ["70000"], PORT),
]


@pytest.mark.parametrize(("flag", "values", "expected"), BAD_VALUES)
def test_explains_a_bad_value_in_one_line(flag: str, values: list[str], expected: str) -> None:
    for value in values:
        assert refusal(f"{flag}={value}", "s.py") == f"{flag}: expected {expected}, got {value!r}"
        assert refusal(flag, value, "s.py") == f"{flag}: expected {expected}, got {value!r}"


BAD_LINES = [
    *((f"--rdzv-endpoint h:{n}", f"--rdzv-endpoint: expected {PORT}, got '{n}'") for n in (70000, "abc", -1)),
    ("--nproc-per-node=gpu", f"--nproc-per-node gpu: no GPU is visible; {LOOK} a number"),
    ("--nproc-per-node=xpu", "--nproc-per-node xpu: can't count XPUs; pass a number"),
    ("--print-completion=bash", "--print-completion: only torchrun itself prints a completion script"),
    ("--standalone --nnodes=2:3", f"--standalone is for one node, but --nnodes is 2:3: {INSTEAD} instead"),
    ("--rdzv-backend=c10d --rdzv-conf=a=1,b", "--rdzv-conf: expected key=value,…, got 'a=1,b'"),
    ("--no-python --module", "--no-python and --module can't be combined"),
    ("--lr=0.1", f"torchrun has no flag --lr {OWN_FLAG}"),
    *((letters, f"torchrun has no flag -x {OWN_FLAG}") for letters in ("-x", "-mx")),
]


@pytest.mark.parametrize(("words", "text"), BAD_LINES)
def test_refuses_a_wrong_command_in_one_line(words: str, text: str) -> None:
    assert refusal(*words.split(), "s.py") == text


# The job


def test_a_bare_script_has_torchruns_defaults() -> None:
    made = job()
    (node,) = made.nodes
    assert (node.procs, node.local, made.program.workdir) == (1, True, "/work")
    assert made.program[:2] == ("script", ("s.py",))
    assert (made.rendezvous.host, made.rendezvous.port, made.rendezvous.id) == (None, None, None)
    assert (made.restarts.most, made.restarts.backoff_s, made.limits.stop_s) == (0, 0.0, 30.0)
    assert (made.limits.lease_s, made.limits.join_s, made.invocation.placeholders) == (30.0, 1e9, False)
    assert (made.program.python, made.program.role) == ("/usr/bin/python3", "default")
    assert made.placement.one_device is False


WORKERS = [("1", 0, 1), ("12", 2, 12), ("cpu", 2, 8), ("auto", 0, 8), ("auto", 2, 2), ("gpu", 3, 3)]


@pytest.mark.parametrize(("words", "gpus", "expected"), WORKERS)
def test_counts_workers_of_nproc_per_node(words: str, gpus: int, expected: int) -> None:
    assert job(f"--nproc-per-node={words}", gpus=gpus).nodes[0].procs == expected


RENDEZVOUS = [
    ("", None, None, None),
    ("--standalone --rdzv-id a", None, None, None),
    ("--standalone --master-port 1234 --rdzv-endpoint h:1", None, None, None),
    ("--rdzv-id a", None, None, "a"),
    ("--master-addr h --master-port 1234", "h", 1234, "none"),
    ("--rdzv-endpoint h:5 --master-addr g --master-port 6", "h", 5, "none"),
    ("--rdzv-endpoint h --master-port 6", "h", 6, "none"),
    ("--rdzv-endpoint [::1]:5", "::1", 5, "none"),
    ("--rdzv-endpoint=", None, None, None),  # as a script passes a variable that is empty
    ("--rdzv-endpoint= --master-port 6", "127.0.0.1", 6, "none"),
    ("--rdzv-backend c10d --rdzv-id a --rdzv-endpoint localhost:0", None, None, "a"),
    ("--rdzv-backend c10d --rdzv-endpoint h:29500 --nnodes 1:1", None, None, "none"),
    ("--rdzv-backend c10d --master-addr g --master-port 6", None, None, "none"),
    ("--rdzv-backend c10d --rdzv-endpoint h:5 --local-addr 127.0.0.2", "127.0.0.2", None, "none"),
    ("--local-addr 127.0.0.2", "127.0.0.2", None, None),
    ("--local-addr 127.0.0.2 --master-port 6", "127.0.0.1", 6, "none"),
]


@pytest.mark.parametrize(("words", "host", "port", "run"), RENDEZVOUS)
def test_chooses_the_rendezvous(words: str, host: str | None, port: int | None, run: str | None) -> None:
    made = job(*words.split())
    assert made.rendezvous[:3] == (host, port, run)
    assert made.name == ("a" if "--rdzv-id a" in words else job().name)


def test_reads_modules_commands_and_run_paths() -> None:
    assert job("-m").program[:2] == ("module", ("s.py",))
    assert job("--no-python").program[:2] == ("command", ("s.py",))
    for others in ("", "--no-python", "--module", "--no-python --module"):
        flags = parsed("--run-path", *others.split(), "s.py", "a", "--b")
        assert flag_messages(flags) == []  # --run-path wins, as torch has it
        program = job_of(flags, here_with()).program
        assert (program[:2], program.args[1:]) == (("script", ("-c",)), ("s.py", "a", "--b"))


def test_reads_restarts_role_device_and_interpreter() -> None:
    made = job("--max-restarts=3", "--role=trainer", "--virtual-local-rank", PYTHON_EXEC="/opt/python")
    assert (made.restarts.most, made.program.role, made.placement.one_device) == (3, "trainer", True)
    assert made.restarts.repeat  # as with torchrun
    assert made.program.python == "/opt/python"


def test_reads_the_shutdown_timeout() -> None:
    assert job("--shutdown-timeout=3").limits.stop_s == 3.0
    assert job(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").limits.stop_s == 4.0
    assert job("--shutdown-timeout=3", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").limits.stop_s == 3.0
    assert job(f"--shutdown-timeout={'9' * 400}").limits.stop_s == 1e9
    told = refusal("s.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in told


def logs(*words: str, **environ: str) -> TorchrunLogs:
    found = job(*words, gpus=0, **environ).logs.torchrun
    assert found
    return found


def test_reads_output_flags() -> None:
    assert parsed("--tee=0", "s.py").streams("tee") == parsed("-r0", "s.py").streams("redirects") == 0
    assert parsed("--tee=0:1,9:2,10:3,127:1", "s.py").streams("tee") == {0: 1, 9: 2, 10: 3, 127: 1}
    assert logs() == TorchrunLogs()
    found = logs("-r3", "-t0:1,10:2", "--local-ranks-filter=0, 10", "--log-line-prefix-template=${rank}>")
    assert found == TorchrunLogs(3, {0: 1, 10: 2}, "${rank}>", frozenset({0, 10}))
    assert logs(TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="x").prefix == "x"
    assert logs("--log-line-prefix-template=y", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="x").prefix == "y"
    shown = logs("--log-dir=/dev/null", "-r3", "--tee=3", "--local-ranks-filter=1")  # there, everything
    assert shown == TorchrunLogs(local_ranks=frozenset({1}))


DIRECTORIES = [
    ("", "/var/tmp", True),
    ("-r3", "/var/tmp", False),
    ("--tee=1", "/var/tmp", False),
    ("--log-dir=/logs", "/logs", False),
    ("--log-dir=logs", "/work/logs", False),
    ("--log-dir=/dev/null --tee=3", "/var/tmp", True),
]


@pytest.mark.parametrize(("words", "directory", "temporary"), DIRECTORIES)
def test_chooses_the_log_directory(words: str, directory: str, temporary: bool) -> None:
    made = job(*words.split())
    assert (made.logs.directory, made.logs.temporary) == (directory, temporary)
    assert made.logs.spares == (() if "logs" in directory else ("/dev/shm",))


# What is left to torch, and what is told


LEFT_TO_TORCH = [
    ("", ""),
    ("--nnodes=2", ""),
    ("--nnodes=1:2", "--nnodes 1:2 without --rdzv-backend c10d"),
    ("--rdzv-backend=c10d --nnodes=1 --rdzv-endpoint=elsewhere:29500", ""),
    ("--rdzv-backend=c10d --nnodes=1:1 --rdzv-conf=is_host=1 --local-addr=a --rdzv-id=j", ""),
    ("--rdzv-backend=c10d --nnodes=4:4 --rdzv-conf=join_timeout=5,store_type=tcp", ""),
    ("--rdzv-backend=c10d --nnodes=1:2", ""),
    ("--rdzv-backend=c10d --nnodes=1:2 --rdzv-conf=store_type=file", "--rdzv-conf store_type=file"),
    ("--rdzv-backend=c10d --nnodes=2 --rdzv-conf=store_type=file", "--rdzv-conf store_type=file"),
    ("--rdzv-backend=etcd --rdzv-endpoint=etcd:2379", "--rdzv-backend etcd"),
    ("--rdzv-backend=etcd-v2 --nnodes=1:2", "--rdzv-backend etcd-v2"),
    ("--rdzv-backend=mine", "--rdzv-backend mine"),
    ("--standalone --rdzv-backend=c10d", ""),
    ("--logs-specs=mine --standalone", "--logs-specs mine"),
    ("--rdzv-backend=static --rdzv-conf=timeout=5", ""),
]


@pytest.mark.parametrize(("words", "why"), LEFT_TO_TORCH)
def test_some_flags_are_left_to_torch(words: str, why: str) -> None:
    timer, limit = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
    for off in ("", "0", "0.0", "-1", "x"):  # as torch reads the limit
        assert left_to_torch(parsed(*words.split(), "s.py"), {timer: "0", limit: off}) == why
    for name, on in ((timer, "1"), (limit, "300"), (limit, "0.5")):
        assert left_to_torch(parsed("s.py"), {name: on}) == f"{name}={on}"


def test_names_flags_without_effect() -> None:
    c10d = "--rdzv-backend=c10d --rdzv-endpoint=h:29500 --rdzv-id=j --rdzv-conf=is_host=1,timeout=9"
    local = f"{c10d} --local-addr=127.0.0.2 --nnodes=1:1"
    for words in ("--nproc-per-node=2 --role=a", "--standalone", c10d, local):
        assert flag_messages(parsed(*words.split(), "s.py")) == []
    for flag in (flag for flag in FLAGS if "no effect" in flag.here):
        line = f"{flag.name} has no effect: {flag.why}"
        assert flag_messages(parsed(flag.name, sample(flag)[0], "--master-port=5", "s.py")) == [line]
        environ = {"PET_MASTER_PORT": "5", flag.variable: sample(flag)[0]}
        named = line.replace(flag.name, flag.variable, 1)
        assert flag_messages(parsed("s.py", **environ)) == [named]


SIGNALS = [
    ("SIGUSR1", ("SIGUSR1",), []),
    (" SIGTERM , SIGPOLL,", ("SIGTERM", "SIGIO"), []),  # one number, two names
    ("SIGTERM,SIGBREAK,15", ("SIGTERM",), ["SIGBREAK", "15"]),
    ("SIGKILL,SIGSTOP,SIGTSTP,SIGINT", ("SIGINT",), ["SIGKILL", "SIGSTOP", "SIGTSTP"]),
    ("", (), []),
]


@pytest.mark.parametrize(("text", "used", "left_out"), SIGNALS)
def test_reads_signals_to_handle(text: str, used: tuple[str, ...], left_out: list[str]) -> None:
    flags = parsed(f"--signals-to-handle={text}", "s.py")
    assert job_of(flags, here_with()).invocation.signals == used
    lines = [f"--signals-to-handle: ignoring {name}, which can't be handled" for name in left_out]
    assert flag_messages(flags) == lines


# The flags are torch's, and the document has them all


def test_the_document_lists_every_flag() -> None:
    rows = re.findall(r"(?m)^\| `(--[a-z-]+)` \| ([^|]+) \| ([^|]*) \| ([^|]+) \|", DOCUMENT.read_text())
    listed = [(name, here, key.strip("` ")) for name, here, key, _ in rows]
    assert listed == [(flag.name, flag.here, flag.key) for flag in FLAGS]
    told = {name: why.replace("`", "") for name, _, _, why in rows}
    assert [flag.name for flag in FLAGS if flag.why not in told[flag.name]] == []
    unused = [flag for flag in FLAGS if "no effect" in flag.here or flag.here in ("handed over", "refused")]
    assert all(flag.why for flag in unused)


def test_knows_every_flag_of_torch() -> None:
    run = pytest.importorskip("torch.distributed.run", reason="torch is not installed")
    known = {flag.field for flag in FLAGS}
    theirs = {action.dest: action for action in run.get_args_parser()._actions if action.option_strings}
    assert set(theirs) - known == set()
    assert known - set(theirs) == {"log_line_prefix_template", "print_completion"} - set(theirs)
    for flag in (flag for flag in FLAGS if flag.choices and flag.field in theirs):
        assert tuple(theirs[flag.field].choices) == flag.choices

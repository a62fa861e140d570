"""Job files as a whole: unreadable files, hostfiles, and random text that never causes a traceback."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distlaunch.cli.job_file import job_of, load_job
from distlaunch.errors import DistlaunchError, JobError, UsageError
from distlaunch.schedulers import job_keys
from distlaunch.transports.ssh import Ssh
from tests.unit.samples import Load, Problems, bounded


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe\x00", r"not UTF-8 text \(byte 0\)"),
        ("ä".encode("latin-1") + b": 1", r"not UTF-8 text \(byte 0\)"),
        (b"[" * 10_000_000, "larger than 1 MiB"),
    ],
    ids=["not UTF-8", "Latin-1", "10 MB of nesting"],
)
def test_refuses_a_file_that_is_not_text(load: Load, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=f"job.yaml: {words}"):
        load(data)


MAPPINGS = "".join(f"{' ' * depth}a:\n" for depth in range(1000))


@pytest.mark.parametrize(
    "text",
    ["[" * 900_000, "{" * 900_000, "- " * 400_000, "? " * 400_000, MAPPINGS],
    ids=["lists", "mappings", "lists in block style", "keys of keys", "mappings in block style"],
)
def test_refuses_deep_nesting_and_binary_junk(problems: Problems, text: str) -> None:
    assert problems(bytes(range(32)))[0].startswith("job.yaml: not YAML: unacceptable character")
    (problem,) = problems(text)
    assert problem.endswith("nested more than 20 levels deep")


BAD_TAGS = ("bool maybe", "int ''", "float ''", "int x", "float x", "timestamp x", "binary x", "set x")


@pytest.mark.parametrize("value", BAD_TAGS)
def test_refuses_a_tag_that_does_not_fit_its_value(load: Load, value: str) -> None:
    with pytest.raises(JobError):
        load(f"script: x\nprocs_per_node: !!{value}")


def test_names_a_missing_file_and_a_directory(load: Load, tmp_path: Path) -> None:
    missing = f"{tmp_path}/nowhere: No such file or directory"
    with pytest.raises(JobError, match=f"yaml:2:11: hostfile: {missing}"):
        load("script: x\nhostfile: nowhere")
    with pytest.raises(JobError, match=f"--set hostfile: {missing}"):
        load("script: x", "hostfile=nowhere")
    with pytest.raises(UsageError, match=r"/none\.yaml: No such file or directory"):
        load_job(f"{tmp_path}/none.yaml")
    (tmp_path / "other.yml").touch()
    with pytest.raises(UsageError, match=r"/other\.yaml: No such file .*; did you mean /.*/other\.yml\?"):
        load_job(f"{tmp_path}/other.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        load_job(str(tmp_path))


# Hostfiles


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "a slots=4\nb slots=2 max_slots=8": [("a", 4), ("b", 2)],
        "a slots=4 max-slots=8\n": [("a", 4)],
        "# all\n\n  a   # the first\n\tb\n": [("a", 7), ("b", 7)],
        "a\na\n": [("a", 2)],  # two lines, two slots
        "a slots=2\nb\na slots=3": [("a", 5), ("b", 7)],
        "a slots=22\nb slots=2000": [("a", 22), ("b", 2000)],  # like ports
        "n[01-02]:2": [("n01", 2), ("n02", 2)],
        "me@a\r\nb\r\n": [("a", 7), ("b", 7)],
        "fe80::1 slots=4\n[::1]:2\n1:2:3:4:5:6:7:8": [("fe80::1", 4), ("::1", 2), ("1:2:3:4:5:6:7:8", 7)],
    }.items(),
)
def test_hostfiles_of_three_tools_are_read(
    load: Load, tmp_path: Path, text: str, expected: list[tuple[str, int | None]]
) -> None:
    (tmp_path / "hosts").write_bytes(text.encode())
    nodes = load("script: x\nhostfile: hosts\nprocs_per_node: 7").nodes
    assert [(node.label, node.procs) for node in nodes] == expected
    assert nodes[0].reach == Ssh(expected[0][0], "me" if "@" in text else None)


PORT = 'write "b slots=2222" in a hostfile; for an SSH port, use ssh_config or nodes: [{host: b, port: 2222}]'


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "a\n  b slots=x": '2:3: slots: expected a number from 1 to 999999, got "x"',
        "a slots=²": '1:1: slots: expected a number from 1 to 999999, got "²"',
        "a slots=0": "1:1: slots",
        "a gpus=4": '1:1: unexpected "gpus=4"; write one host per line',
        "-oProxyCommand=x": "1:1: a host name can't begin with a dash",
        "a;b": '1:1: "a;b" is not a valid host name',
        "a\nb:2222": f'2:1: "b:2222" means 2222 slots; if that is right, {PORT}',
        "a:22": '1:1: "a:22" means 22 slots',
        "# nobody\n": " the hostfile lists no hosts",
    }.items(),
)
def test_places_mistakes_in_a_hostfile(problems: Problems, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "hosts").write_text(text)
    (problem,) = problems("script: x\nhostfile: hosts")
    assert problem.startswith(f"hosts:{expected}")


# Never a traceback

_TOKENS = [
    *(f"{key}: " for key in job_keys().fields),
    *("host: ", "gpus: ", "endpoint: ", "connect: ", "console: ", "persist: ", "config: ", "A: "),
    *("\n", "\n  ", "\n    ", "- ", "\n- ", "\n  - ", ", ", ": ", " ", "\t", "#", "---\n", "...\n"),
    *("[", "]", "{", "}", "'", '"', "|\n  ", ">\n  ", "? ", "&a ", "*a", "<<: ", "%YAML 1.1\n", "@", "`"),
    *("!!int ", "!!bool ", "!!float ", "!!null ", "!!str ", "!!seq ", "!!map ", "!!timestamp ", "!x ", "!"),
    *("null", "~", "yes", "1", "-1", "0x", "1e5", ".inf", "1:30", "2024-01-01", "9" * 400),
    *("auto", "10m", "5s", "train.py", "gpu[1-3]", "a@b", "localhost", "a:0", "x"),
    *("\\0", "\\ud800", "é", "\x85", "\u2028", "\ufeff"),
]


@given(st.lists(st.sampled_from(_TOKENS), max_size=25).map("".join) | st.text(max_size=40))
@example("script: x\nname: !!bool x")
@example("\x85*a&a ")
@example("a: b\u2028*a&a")
@example("a: 1\r*a&a")
@bounded(400)
def test_any_text_loads_or_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_job(str(path))
    except DistlaunchError as error:
        assert str(error)


@given(st.text(max_size=30), st.text(max_size=30))
@bounded(200)
def test_any_override_is_taken_or_refused_in_words(key: str, value: str) -> None:
    try:
        job_of("script: x\nargs: [a]\nnodes: [{host: a}]\n", "/job.yaml", [f"{key}={value}"])
    except DistlaunchError as error:
        assert str(error)

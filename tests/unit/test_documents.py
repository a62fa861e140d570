"""What is kept of job files that were read before is what YAML makes of them, or it is not used."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.errors import JobError
from distlaunch.job.document import Value
from distlaunch.system import cache, documents, yaml_document
from distlaunch.system.documents import parse
from tests.harness import ROOT
from tests.unit.samples import bounded

FILES = sorted((ROOT / "configs").rglob("*.yaml"))
ODD = [
    "",
    "# nothing",
    "a",
    "[]",
    "{}",
    "a: 1\nb: [1, {c: 2.5, d: ~}]\ne: 'x'\n",
    "a: 0x1F\nb: 1e400\nc: .nan\nd: yes\ne: 2020-01-01\nf: 1_000\n" + "g: " + "9" * 39,
    "1: a\n~: b\n'': c",
    "a: |\n  é\n  \u2028\nb: \U0001f600",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distlaunch" / "read"


class Reads:
    """Counts how often YAML is read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.times, self._parsed = 0, yaml_document.parsed
        patch.setattr(yaml_document, "parsed", self)

    def __call__(self, text: str, source: str) -> Value:
        self.times += 1
        return self._parsed(text, source)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """None yet."""
    return Reads(monkeypatch)


@pytest.mark.parametrize("text", [*ODD, *(pytest.param(path.read_text(), id=path.stem) for path in FILES)])
def test_what_was_read_before_is_the_same_without_yaml(text: str, reads: Reads) -> None:
    first = parse(text, "job.yaml")
    assert repr(parse(text, "job.yaml")) == repr(first)  # repr, as nan is not equal to itself
    assert reads.times == 1


_texts = st.recursive(
    st.sampled_from(["1", "x", "~", "true", "'a b'", "1.5", '"\\n"']),
    lambda each: (
        st.lists(each, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from("abc"), each).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs.items()) + "}"
        )
    ),
    max_leaves=12,
)


@given(_texts, st.sampled_from(["job.yaml", "--set a"]))
@bounded(100)
def test_any_document_is_the_same(text: str, source: str) -> None:
    assert repr(parse(text, source)) == repr(parse(text, source)) == repr(yaml_document.parsed(text, source))


def test_another_text_or_another_name_is_read(reads: Reads) -> None:
    for text, source in (("a: 1", "x"), ("a: 2", "x"), ("a: 1", "y")):
        assert repr(source) in repr(parse(text, source))
    assert reads.times == 3


def test_a_mistake_is_told_each_time(reads: Reads) -> None:
    for _ in range(2):
        with pytest.raises(JobError, match="duplicate key"):
            parse("a: 1\na: 2", "job.yaml")
    assert reads.times == 2


def test_another_version_reads_again(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    parse("a: 1", "x")
    monkeypatch.setattr(documents, "state_of", lambda path: (path, 1, 2))
    parse("a: 1", "x")
    assert reads.times == 2


@pytest.mark.parametrize("junk", [b"", b"\0", b"junk", b"(\x02\x00\x00\x00NN", b"{" * 99])
def test_junk_in_the_cache_is_not_used(own_cache: Path, reads: Reads, junk: bytes) -> None:
    expected = parse("a: 1", "x")
    (kept,) = own_cache.iterdir()
    kept.write_bytes(junk)
    assert parse("a: 1", "x") == expected
    assert parse("a: 1", "x") == expected
    assert reads.times == 2


def test_a_document_that_can_not_be_kept_is_read_each_time(own_cache: Path, reads: Reads) -> None:
    own_cache.parent.touch()
    assert parse("a: 1", "x") == parse("a: 1", "x")
    assert reads.times == 2


def test_what_is_kept_is_the_users_alone(own_cache: Path) -> None:
    parse("env: {TOKEN: secret}", "x")
    assert own_cache.stat().st_mode & 0o777 == 0o700


def test_the_cache_does_not_grow_without_end(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FILES", 8)
    for number in range(50):
        parse(f"a: {number}", "x")
    assert len(os.listdir(own_cache)) <= 8

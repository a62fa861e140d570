"""The words of a shell that a command line which becomes a job file is made of, and prompts before it."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.dropin.around import launcher_line
from distlaunch.dropin.shell_words import shell_commands
from distlaunch.errors import UsageError
from tests.unit.drafts import comments, imported, keys_of, words_in
from tests.unit.samples import bounded, process_text


@given(words=st.lists(process_text, max_size=6))
@bounded()
def test_quoted_words_are_taken_apart_as_they_were_joined(words: list[str]) -> None:
    assert words_in(shlex.join(words)) == tuple(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a \\\n  b", ["a", "b"]),
        ("a\\\nb", ["ab"]),
        ('"a\\\nb" "\\$x" "\\n" "\\"" "\\\\"', ["ab", "$x", "\\n", '"', "\\"]),
        ("'a\\\nb'", ["a\\\nb"]),
        ("''", [""]),
        ("a'b'\"c\"\\ d", ["abc d"]),
        ("  \t", []),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    assert list(words_in(text)) == words


@pytest.mark.parametrize(
    ("text", "character", "words"),
    [
        ("torchrun 'x", 10, "is not closed"),
        ('torchrun "x', 10, "is not closed"),
        ("torchrun x \\", 12, "a backslash ends the command, with nothing to escape"),
        ("(torchrun x)", 1, "( is shell syntax; quote it, or give only the command inside"),
        ("torchrun $(cat x", 10, "this $( or ${ is not closed"),
        ("torchrun `cat x", 10, "this ` is not closed"),
    ],
)
def test_what_only_a_shell_can_do_is_refused_with_its_place(text: str, character: int, words: str) -> None:
    with pytest.raises(UsageError, match=f"character {character}: ") as caught:
        shell_commands(text)
    assert words in str(caught.value)


def test_variables_that_nobody_fills_in_are_named() -> None:
    draft = imported('torchrun x.py $A \'$B\' "${C}x" "\\$D"')
    assert "job files don't expand shell variables: write the values of $A ${C}" in comments(draft)
    assert keys_of(draft)["args"] == ["$A", "$B", "${C}x", "$D"]


PROMPTS = [
    *("$ ", "% ", "> ", "# ", "  $  ", "user@host:~$ ", "(base) me@h:~/x$ ", "(v)$ ", "[me@n dir]# "),
    *("me@host ~ % ", "root@h:/a-b/c# ", "\u276f "),
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_that_was_copied_along_is_taken_off(prompt: str) -> None:
    text = "torchrun --nproc-per-node 2 \\\n{}x.py '$ a' > log"
    plain = launcher_line(text.format(""))
    assert launcher_line(prompt + text.format("")) == plain
    assert launcher_line(prompt + text.format("> ")) == plain


@pytest.mark.parametrize(
    "text", ["$A torchrun x.py", "A=b torchrun x.py", "me@host torchrun x.py", "a; torchrun x"]
)
def test_what_is_no_prompt_stays(text: str) -> None:
    line = launcher_line(text)
    assert line.command.words[0] == text.split(maxsplit=1)[0] or line.notes

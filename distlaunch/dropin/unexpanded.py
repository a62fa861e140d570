"""What only a shell would have put into a torchrun command, and what to do about it in a job file."""

from collections.abc import Iterator

from distlaunch.dropin.calls import Call
from distlaunch.dropin.flags import FLAG, Flags
from distlaunch.dropin.shell_words import Command

_NO_SHELL = "job files don't expand shell variables"
_NO_HOME = "job files expand ~ only in paths such as script and workdir"
_NO_PATTERN = "job files don't expand patterns"


def left_out(flags: Flags) -> Iterator[str]:
    """What to do about the flags whose values only a shell knows."""
    for field, value in flags.unfilled:
        if field:
            flag = FLAG[field]
            yield f"left out: {flag.name} {value}: {flag.left_out or f'{_NO_SHELL}; write the value'}"
        else:
            yield f"left out: {value}: write its flags in the command, or their keys here"


def unexpanded(call: Call, command: Command) -> Iterator[str]:
    """What stays as it is, though a shell would have put something else there."""
    env = (text for name, text in call.env.items() if not name.startswith("PET_"))
    words = (call.flags.script, *call.flags.args, *env)
    left = [name for name in command.variables if any(name in word for word in words)]
    if left:
        yield f"{_NO_SHELL}: write the values of {' '.join(left)}"
    args = set(call.flags.args)
    of_env = {f"{name}={text}" for name, text in call.env.items() if not name.startswith("PET_")}
    if homes := [word for word in command.homes if word in args | of_env]:
        yield f"{_NO_HOME}: write the full path for {' '.join(homes)}"
    if patterns := [word for word in command.patterns if word in {call.flags.script, *args}]:
        yield f"{_NO_PATTERN}: write the words for {' '.join(patterns)}"

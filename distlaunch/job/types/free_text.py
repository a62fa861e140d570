"""Text that is not checked further, for the values of any section: a string, a line, variables."""

from distlaunch.job.types.records import MapOf
from distlaunch.job.types.values import Text, Word

ENV = MapOf(Word(), r"[A-Za-z_][A-Za-z0-9_]*", "a variable name")
SOME_TEXT = Text("a non-empty string", r"[^\0]+")
LINE = Text("a non-empty line", r"[^\0\n]+")

"""Drafts of job files, which have keys and comments. The simplest draft comes from a hostfile."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distlaunch.errors import UsageError
from distlaunch.job.build import build_spec
from distlaunch.job.document import Data, Place, job_text, value_of
from distlaunch.job.nodes import HostEntry, Surroundings, parse_hostfile
from distlaunch.job.text import escaped_in, literal
from distlaunch.schedulers import job_keys, sections

LISTED_HOSTS = 16
"""Maximum hosts listed by name. More hosts become a range."""


class Draft:
    """A draft of a job file from `source`; `typed` = no shell has expanded the source."""

    def __init__(self, source: str, typed: bool = False) -> None:
        self.source, self.typed = source, typed
        self.keys: dict[str, Any] = {}
        self.notes: list[tuple[str, str]] = []
        """(text, key) of each comment. The comment goes above its key, or at the top if the key is ""."""

    def set(self, path: str, value: Data) -> None:
        """Set a key, or a key of a section such as `logs.dir`; None leaves it unchanged."""
        section, _, key = path.rpartition(".")
        if value is not None:
            (self.keys.setdefault(section, {}) if section else self.keys)[key] = value

    def note(self, *texts: str, key: str = "") -> None:
        """Add comments above `key`; "" = at the top."""
        self.notes += [(text, key) for text in texts]

    def path(self, text: str) -> str:
        """Return a path for a job file. A ~ that a shell left unexpanded is part of a name."""
        return text if self.typed or not text.startswith("~") else f"./{text}"

    def set_program(self, words: Sequence[str], kind: str = "script", args: Iterable[str] = ()) -> None:
        """Set the program and its arguments, or placeholders for them.

        `args` may contain placeholders. Without `args`, the words after the first are passed literally.
        """
        if not words:
            self.set("script", "train.py")
            self.note("replace with your script and its arguments", key="script")
            return
        if words[0] == "-m" and words[1:]:
            kind, words = "module", words[1:]
        name = self.path(words[0]) if kind == "script" or "/" in words[0] else words[0]
        self.set(kind, [name] if kind == "command" else name)
        self.set("args", [*args] or [*map(literal, words[1:])] or None)
        if found := escaped_in(words[1:]):
            names = ", ".join("{{" + word + "}}" for word in found)
            text = "doubled braces reach the script as single ones; names in single braces are replaced"
            self.note(f"{names}: {text}", key="args")

    def set_hosts(self, first: str | None, count: int) -> None:
        """Set nodes to `count` placeholder names, except for the first host if known."""
        others = [f"NODE_NAME_{i}" for i in range(1, count)]
        if count > LISTED_HOSTS:
            others = [f"NODE_NAME_[1-{count - 1}]"]
        self.set("nodes", [first or "NODE_NAME_0", *others])
        advice = "rank 0 runs on the first" if first else "the host of rank 0 comes first"
        self.note(f"replace with your host names, as used with ssh; {advice}", key="nodes")

    def set_hostfile(self, entries: Sequence[HostEntry]) -> None:
        """Set nodes to the hosts of a hostfile, each with its number of workers."""
        slots = [
            (f"{entry.user}@{entry.host}" if entry.user else entry.host, entry.slots) for entry in entries
        ]
        same = len({count for _, count in slots}) == 1
        self.set("nodes", [{"host": n, "procs": procs} if procs and not same else n for n, procs in slots])
        self.set("procs_per_node", slots[0][1] if same else None)

    def set_env(self, env: Mapping[str, str]) -> None:
        """Add variables, and set gpus_per_node from CUDA_VISIBLE_DEVICES."""
        if env:
            own = {name: literal(text, every=False) for name, text in env.items()}
            self.keys["env"] = {**self.keys.get("env", {}), **own}
        if (gpus := env.get("CUDA_VISIBLE_DEVICES")) is not None:
            names = [name for name in gpus.split(",") if name.strip() not in ("", "-1")]
            self.set("gpus_per_node", len(names))

    def note_store(self, setting: str, backend: str, endpoint: str) -> None:
        """Add a comment on a rendezvous backend and, for an etcd server, a comment on torch agents."""
        texts = [f"{setting}{backend}: distlaunch assigns the ranks itself and needs no store"]
        if backend.startswith("etcd"):
            advice = "for torch's own elastic agents instead, set rendezvous.backend to etcd-v2 and"
            texts.append(f"{advice} rendezvous.endpoint to {endpoint or 'ETCD_HOST:2379'}")
        self.note(*texts, key="rendezvous")

    def checked(self) -> "Draft":
        """Return this draft, with a comment if dry-run couldn't determine the number of GPUs.

        Raises `JobError` for invalid keys, and `UsageError` for values that aren't valid text.
        """
        if re.search("[\ud800-\udfff]", json.dumps([self.keys, self.notes], ensure_ascii=False)):
            raise UsageError(f"{self.source}: not UTF-8 text")
        if self.keys.get("virtual_local_rank") and "CUDA_VISIBLE_DEVICES" in self.keys.get("env", {}):
            del self.keys["env"]["CUDA_VISIBLE_DEVICES"]
            text = "virtual_local_rank sets CUDA_VISIBLE_DEVICES; to choose GPUs, set it on the nodes"
            self.note(text, key="virtual_local_rank")
        around = Surroundings("/", "/", {}, sections=sections(self.keys), in_image=True)
        build_spec(value_of(self.keys, Place(self.source)), self.source, around)
        if {"nodes", "hostfile"} & self.keys.keys() and "gpus_per_node" not in self.keys:
            hint = "set gpus_per_node to the number of GPUs per node, or to 0 for a CPU job"
            self.note(f"only `run` detects GPUs; for dry-run, {hint}", key="gpus_per_node")
        return self

    def _order(self) -> Iterable[str]:
        """Return the keys in the order of the reference.

        A key with comments but no value may be a section.
        """
        return job_keys([*self.keys, *(key for _, key in self.notes if key)]).fields

    def document(self) -> dict[str, object]:
        """Return the keys and comments, for JSON."""
        keys = {key: self.keys[key] for key in self._order() if key in self.keys}
        return {"job": keys, "comments": [text for text, _ in self.notes]}

    def text(self) -> str:
        """Return the job file."""
        return job_text(self.keys, self.notes, self._order())


def hostfile_draft(text: str, source: str, program: Sequence[str] = ()) -> Draft:
    """Draft a job for the hosts of a hostfile. Raises `JobError` with all problems."""
    entries = parse_hostfile(text, source)
    draft = Draft(source)
    draft.set_program(program)
    draft.set_hostfile(entries)
    if re.search(r"max[-_]slots=", text):
        draft.note("max_slots has no equivalent: distlaunch never oversubscribes", key="nodes")
    draft.note("to read the hostfile at each start, set hostfile to its path instead of nodes", key="nodes")
    return draft.checked()

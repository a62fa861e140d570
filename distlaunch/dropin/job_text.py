"""A job file's text from its keys and comments."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from distlaunch.errors import JobError, UsageError
from distlaunch.job.build import build_spec
from distlaunch.job.document import Entries, Items, Place, Scalar, Value
from distlaunch.job.fields import JOB
from distlaunch.job.placeholders import escaped_in, literal
from distlaunch.job.reading import Surroundings
from distlaunch.schedulers import sections

Data = str | int | float | bool | None | Sequence["Data"] | Mapping[str, "Data"]
WIDTH = 100
"""A list or mapping that is longer than this has a line for each item."""
NO_SCRIPT = "train.py"
_DRY_RUN = "for dry-run, which contacts no host"


class Note(NamedTuple):
    """A comment, above the key that it is about, or at the top."""

    text: str
    key: str = ""


class Offer(NamedTuple):
    """An alternative for a key, or an addition to it, as comments to take the # from.

    A mapping's entries are added to those of the same key; `instead_of` names a key that has to go for it.
    """

    text: str
    key: str
    value: "Data"
    instead_of: str = ""


class Draft(NamedTuple):
    """A job file in the making."""

    keys: Mapping[str, Data] = {}
    notes: tuple[Note, ...] = ()
    offers: tuple[Offer, ...] = ()

    def taking(self, offer: Offer) -> "Draft":
        """The draft in which an offer is taken."""
        rest = {key: value for key, value in self.keys.items() if key != offer.instead_of}
        return joined([Draft(rest), Draft({offer.key: offer.value})])


def joined(parts: Iterable[Draft]) -> Draft:
    """All keys, notes and offers; mappings of the same key are joined."""
    keys: dict[str, Data] = {}
    notes: list[Note] = []
    offers: list[Offer] = []
    for part in parts:
        for key, value in part.keys.items():
            before = keys.get(key)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            keys[key] = {**before, **value} if both else value  # type: ignore[dict-item]
        notes += part.notes
        offers += part.offers
    return Draft(keys, tuple(dict.fromkeys(notes)), tuple(offers))


def kept_path(text: str) -> str:
    """A path as a shell has left it: a ~ that is still there is part of a name."""
    return f"./{text}" if text.startswith("~") else text


def program_draft(
    words: Sequence[str],
    kind: str = "script",
    first: Sequence[str] = (),
    path: Callable[[str], str] = kept_path,
) -> Draft:
    """The program and its arguments, or a place for them.

    Arguments in `first` may have placeholders; the others arrive as they are. `path` makes a job file's path.
    """
    if not words:
        return Draft({"script": NO_SCRIPT}, (Note("put your script and its args here", "script"),))
    name = path(words[0]) if kind == "script" or "/" in words[0] else words[0]
    args = [*first, *map(literal, words[1:])]
    keys: dict[str, Data] = {kind: [name] if kind == "command" else name}
    notes = []
    if found := escaped_in(words[1:]):
        names = ", ".join("{{" + word + "}}" for word in found)
        told = "doubled braces reach the script as single ones; single ones are filled in"
        notes.append(Note(f"{names}: {told}", "args"))
    return Draft({**keys, "args": args} if args else keys, tuple(notes))


def gpus_offer(draft: Draft) -> Draft:
    """The draft with an offer to say what dry-run does not ask: how many GPUs other machines have."""
    if not {"nodes", "hostfile"} & set(draft.keys) or "gpus_per_node" in draft.keys:
        return draft
    procs = draft.keys.get("procs_per_node")
    told = f"{_DRY_RUN}: the number of GPUs on each host (0 = a CPU job; run detects them):"
    offer = Offer(told, "gpus_per_node", procs if isinstance(procs, int) else 8)
    return draft._replace(offers=(*draft.offers, _uneven_offer(draft.keys.get("nodes")) or offer))


def etcd_offer(backend: str, endpoint: str, conf: str = "") -> tuple[Offer, ...]:
    """torch's own elastic agents, to a job that had them meet at an etcd server; 2379 is its usual port."""
    if not backend.startswith("etcd"):
        return ()
    if not re.search(r":[0-9]+$", endpoint):
        endpoint = f"{endpoint or 'ETCD_HOST'}:2379"
    more = dict(re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)\s*=\s*([^,]+?)\s*(?=,|$)", conf))
    value: dict[str, Data] = {"backend": "etcd-v2", "endpoint": endpoint} | ({"conf": more} if more else {})
    return (Offer("for torch's own elastic agents instead:", "rendezvous", value),)


def visible_gpus(env: Mapping[str, str]) -> Draft:
    """`gpus_per_node` where the job itself says which GPUs its workers see."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return Draft()
    return Draft({"gpus_per_node": len([name for name in text.split(",") if name.strip() not in ("", "-1")])})


def _uneven_offer(nodes: Data) -> Offer | None:
    """Where each host has its own number of workers, the same number of GPUs is likelier than one for all."""
    given = nodes if isinstance(nodes, Sequence) else ()
    listed = [node for node in given if isinstance(node, Mapping) and "procs" in node]
    if not listed or len(listed) < len(given):
        return None
    told = f"instead of nodes, {_DRY_RUN}: each host's GPUs (0 = a CPU job; run detects them):"
    return Offer(told, "nodes", [{**node, "gpus": node["procs"]} for node in listed], "nodes")


def checked(draft: Draft, source: str) -> Draft:
    """The draft, with those of its offers that a job file may take.

    Raises `JobError` if a job file may not say so, `UsageError` for what is not text.
    """
    texts = [draft.keys, [offer.value for offer in draft.offers], [note.text for note in draft.notes]]
    if re.search("[\ud800-\udfff]", json.dumps(texts, ensure_ascii=False)):
        raise UsageError(f"{source}: not UTF-8 text")
    _build(draft, source)
    return draft._replace(offers=tuple(offer for offer in draft.offers if _may_take(draft, offer, source)))


def _may_take(draft: Draft, offer: Offer, source: str) -> bool:
    try:
        _build(draft.taking(offer), source)
    except JobError:
        return False
    return True


def _build(draft: Draft, source: str) -> None:
    around = Surroundings("/", "/", {}, sections=sections(draft.keys.keys() - JOB.fields.keys()))
    build_spec(value_of(draft.keys, Place(source)), source, around)


def value_of(data: Data, place: Place) -> Value:
    """As if it had been read there."""
    match data:
        case Mapping():
            entries = ((Scalar(key, place, key), value_of(value, place)) for key, value in data.items())
            return Entries(tuple(entries), place)
        case Sequence() if not isinstance(data, str):
            return Items(tuple(value_of(item, place) for item in data), place)
        case _:
            return Scalar(data, place, str(data))


def draft_document(draft: Draft) -> dict[str, object]:
    """The same for machines."""
    keys = {key: draft.keys[key] for key in _order(draft) if key in draft.keys}
    notes = [note.text for note in draft.notes]
    offers = [f"{offer.text} {offer.key}: {flow_text(offer.value)}" for offer in draft.offers]
    return {"job": keys, "comments": notes + offers}


def draft_text(draft: Draft) -> str:
    """The job file: notes at the top, then the keys in the reference's order, their notes above them."""
    lines = [*_comments(draft, ""), ""] if _comments(draft, "") else []
    for key in _order(draft):
        lines += _comments(draft, key)
        offers = [offer for offer in draft.offers if offer.key == key]
        inside = [offer for offer in offers if isinstance(draft.keys.get(key), Mapping)]
        lines += [line for offer in offers if offer not in inside for line in _offered(offer)]
        lines += _entry(key, draft.keys[key], block=bool(inside)) if key in draft.keys else []
        lines += [line for offer in inside for line in _offered_inside(offer)]
    return "\n".join(lines) + "\n"


def _order(draft: Draft) -> list[str]:
    noted = {note.key for note in draft.notes if note.key}
    wanted = {*draft.keys, *noted, *(offer.key for offer in draft.offers)}
    return [key for key in JOB.fields if key in wanted] + sorted(wanted - set(JOB.fields))


def _comments(draft: Draft, key: str) -> list[str]:
    return [f"# {_escaped(note.text)}" for note in draft.notes if note.key == key]


def _offered(offer: Offer) -> list[str]:
    return [f"# {_escaped(offer.text)}", f"# {offer.key}: {flow_text(offer.value)}"]


def _offered_inside(offer: Offer) -> list[str]:
    assert isinstance(offer.value, Mapping)
    entries = [f"  # {name}: {flow_text(item)}" for name, item in offer.value.items()]
    return [f"  # {_escaped(offer.text)}", *entries]


def _entry(key: str, value: Data, *, block: bool = False) -> list[str]:
    flow = f"{key}: {flow_text(value)}"
    if (not block and len(flow) <= WIDTH) or isinstance(value, str) or not value:
        return [flow]
    match value:
        case Mapping():
            return [f"{key}:", *(f"  {name}: {flow_text(item)}" for name, item in value.items())]
        case Sequence():
            return [f"{key}:", *(f"  - {flow_text(item)}" for item in value)]
    return [flow]


# What YAML 1.1 and 1.2 both take for a string without quotes, whatever stands around it.
_PLAIN = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)"
    r"(?:(?:--?|\.{0,2}/)?[a-z_][a-z0-9_./@%+=~-]*|[0-9]+(?:s|m|h))",
    re.IGNORECASE | re.ASCII,
)


def flow_text(data: Data) -> str:
    """YAML on one line: JSON with fewer quotes."""

    def quoted(found: re.Match[str]) -> str:
        return found[1] if _PLAIN.fullmatch(found[1]) else _escaped(found[0])

    return re.sub(r'"((?:[^"\\]|\\.)*)"', quoted, json.dumps(data, ensure_ascii=False))


def _escaped(text: str) -> str:
    """`text` on one line, with what can't be seen as YAML's escapes."""
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)

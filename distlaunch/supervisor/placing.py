"""Placing the job's tree on the nodes, which request the contents they lack and verify every file."""

import re
from collections import Counter

from distlaunch.agent import messages
from distlaunch.errors import Exit
from distlaunch.supervisor.actions import Send, SendTree, ShowMessage
from distlaunch.supervisor.events import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import Code, Up
from distlaunch.supervisor.state import Cause, Phase, State, Timer
from distlaunch.wording import counted


def code_of(state: State, node: int) -> Code | None:
    """Return the state of the job's tree on a node with an agent; None = not requested."""
    this = state.nodes[node]
    return this.code if isinstance(this, Up) else None


def lacks_code(state: State, node: int) -> bool:
    """Return whether a node doesn't have the job's tree yet."""
    code = code_of(state, node)
    return state.spec.tree is not None and not (code and code.placed)


def request(state: State, node: int) -> Send:
    """Return the request to create the job's tree, and its environment, on a node."""
    tree, setup = state.spec.tree, None
    assert tree is not None
    program = state.spec.program_of(state.spec.pool[node])
    if wanted := state.spec.setup:
        packages = wanted.kind == "controller"  # in the tree's root
        workdir = f"{tree.base}/runs/{state.run_id}" if packages else program.workdir
        where = (workdir, program.python or "", program.fixed_env, state.spec.limits.setup_s)
        image = state.spec.container.image if state.spec.container else ""
        setup = messages.Setup(wanted.kind, wanted.run, wanted.files, *where, image)
    return Send(node, messages.PlaceTree(state.run_id, tree.digest, tree.base, setup))


def _with_code(state: State, node: int, code: Code) -> State:
    return state.with_node(node, state.up(node)._replace(code=code))


def on_tree_lacks(event: messages.TreeLacks, state: State, now: float) -> Step:
    """Send a node the contents that it lacks, unless its report is implausible."""
    code, tree = code_of(state, event.node), state.spec.tree
    if tree is None or code is None or code.placed:
        return state, ()
    too_often = code.sent == messages.MAX_LACKS
    if too_often or (event.contents and event.contents[-1] >= tree.files):
        why = "requests it again and again" if too_often else "requests files that are not in it"
        return on_tree_refused(messages.TreeRefused(event.node, f"the node {why}"), state, now)
    state = _longer(_with_code(state, event.node, code._replace(sent=code.sent + 1)), now)
    send = SendTree(event.node, event.contents)
    if not event.contents:
        return state, (send,)
    what = f"sending {counted(len(event.contents), 'file')} of the code"
    return state, (ShowMessage("info", f"{state.label(event.node)}: {what}"), send)


def _longer(state: State, now: float) -> State:
    """Return `state` with more time for the preparation, because a node is making progress."""
    if state.due_at(Timer.PREPARE) is None:
        return state
    return state.with_timer(Timer.PREPARE, now + state.spec.limits.connect_s)


def on_tree_progress(event: messages.TreeProgress, state: State, now: float) -> Step:
    """Allow more time for a node that is receiving the tree."""
    return _longer(state, now), ()


def on_tree_placed(event: messages.TreePlaced, state: State, now: float) -> Step:
    """Record that a node has the tree."""
    code = code_of(state, event.node)
    if code is None or state.spec.tree is None or event.tree != state.spec.tree.digest:
        return state, ()
    code = code._replace(placed=True, environment=event.environment, versions=event.versions)
    return _longer(_with_code(state, event.node, code), now), ()


def on_setup_printed(event: messages.SetupPrinted, state: State, now: float) -> Step:
    """Show the output of setup commands from the first node. The others print the same."""
    if event.node != next(iter(state.members), 0):
        return state, ()
    lines = [line.strip() for line in event.text.splitlines() if line.strip()]
    return state, tuple(ShowMessage("info", f"{state.label(event.node)}: {line}") for line in lines)


def with_environments(state: State) -> State:
    """Return `state` with a plan whose ranks use the environments that were built on their nodes."""
    if state.spec.setup is None:
        return state
    of_nodes = [(part, code_of(state, part.node) or Code()) for part in state.planned.nodes]
    parts = tuple(part._replace(python=f"{code.environment}/bin/python") for part, code in of_nodes)
    return state._replace(plan=state.planned._replace(nodes=parts))


def differing(state: State, now: float) -> Cause | None:
    """Return the root cause if versions differ between the nodes' environments, else None."""
    codes = {node: code for node in state.members if (code := code_of(state, node))}
    for name in dict.fromkeys(name for code in codes.values() for name, _ in code.versions):
        of_nodes = {node: dict(code.versions).get(name, "none") for node, code in codes.items()}
        usual = Counter(of_nodes.values()).most_common(1)[0][0]
        first = next(each for each in of_nodes.items() if each[1] == usual)
        if odd := next((each for each in of_nodes.items() if each[1] != usual), None):
            label, value = state.label(odd[0]), odd[1]
            text = f"{name} is {value} on {label}, but {first[1]} on {state.label(first[0])}"
            do = "pin the exact versions of torch and its dependencies"
            if name == "python":
                do = "set python to the same version on all nodes"
            if name in ("nccl", "libnccl"):
                do = f"check LD_LIBRARY_PATH on {label}, and pin torch and its dependencies"
            elif name == "torch" and "none" in (value, first[1]):
                lacking = odd[0] if value == "none" else first[0]
                place, where = codes[lacking].environment, state.label(lacking)
                do = f"run `{place}/bin/python -c 'import torch'` on {where} to see why, correct that, "
                do += f"and delete {place} there, so that it is built again"
            return Cause(f"the environments differ: {text}; {do}", Exit.FAILED, now, node=odd[0])
    return None


_NO_INTERNET = r"from versions: none|name resolution|Failed to establish|dns error|unreachable|timed out"
"""Messages of pip, uv and conda on nodes that can't reach a package index."""
_FULL = r"No space left|[Qq]uota exceeded|Read-only file system"


def on_tree_refused(event: messages.TreeRefused, state: State, now: float) -> Step:
    """End the job because a node can't get the tree. If the node is new in a restart, continue without it."""
    this = state.nodes[event.node]
    if not isinstance(this, Up) or this.code is None or state.phase is Phase.STOPPING:
        return state, ()
    label, setup = state.label(event.node), state.spec.setup
    log = f"setup-{label}.log".replace("/", "-")
    copying = f"can't copy the code to {label}: {event.error}"
    building = f"can't build the environment on {label}: {event.error}; all output is in {log} in the run "
    building += "directory"
    if setup and setup.kind in ("uv", "run") and re.search(_NO_INTERNET, event.error):
        building += "; if the node can't reach a package index, use setup: {from: controller}, and for a job "
        building += "in a queue, run `distlaunch dry-run` on the login node first"
    elif setup and re.search(_FULL, event.error):
        building += "; free up space on the node, or set sync.to to another directory there"
    status = Exit.TIMEOUT if event.late else Exit.FAILED
    text = building if event.placed else copying
    cause = Cause(text, status, now, node=event.node, kind="node_lost")
    if not state.attempt:
        return state, (JobOver(cause),)
    state = state.with_node(event.node, this._replace(code=None, unfit=text))
    return state, (AttemptFailed(cause),) if event.node in state.members else ()


def on_tree_kept(event: messages.TreeKept, state: State, now: float) -> Step:
    """Report where to find files that the ranks have written into the tree."""
    text = f"{state.label(event.node)}: the job left files in {event.path}"
    if not state.spec.collect.paths:
        text += "; set `collect` to bring files back, or write to an absolute path"
    return state, (ShowMessage("info", text),)

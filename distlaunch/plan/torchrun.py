"""A plan as torchrun commands: one line per node."""

from shlex import quote

from distlaunch.plan.layout import PLACEHOLDERS, LaunchPlan, NodePlan


def torchrun_text(plan: LaunchPlan, port: int) -> str:
    """The equivalent torchrun lines, with comments where torchrun has no equal."""
    lines = []
    for node in plan.nodes:
        lines += [f"# node {node.label}", _line(plan, node, port), ""]
    return "\n".join([*_remarks(plan), *lines])


def _remarks(plan: LaunchPlan) -> list[str]:
    used = [name for name in PLACEHOLDERS if any("{" + name + "}" in argument for argument in plan.spec.args)]
    if not used:
        return []
    names = ", ".join("{" + name + "}" for name in used)
    return [f"# torchrun can't fill in {names}: the script must read them itself"]


def _line(plan: LaunchPlan, node: NodePlan, port: int) -> str:
    spec = plan.spec
    flags = [
        f"--nnodes={len(plan.nodes)}",
        f"--node-rank={node.index}",
        f"--nproc-per-node={node.procs}",
        f"--master-addr={plan.master_addr}",
        f"--master-port={port}",
        *([f"--rdzv-id={spec.rendezvous_id}"] if spec.rendezvous_id else []),
        *{"module": ["--module"], "command": ["--no-python"], "script": []}[spec.program.kind],
    ]
    exports = [f"{name}={_value(value.text, value.inherited, name)}" for name, value in node.env.items()]
    export = f"export {' '.join(exports)} && " if exports else ""
    words = " ".join(map(quote, ["torchrun", *flags, *spec.program.words, *spec.args]))
    return f"(cd {quote(node.workdir)} && {export}exec {words})"


def _value(text: str, inherited: bool, name: str) -> str:
    return f'"${{{name}?not set}}"' if inherited else quote(text)

"""A plan as shell commands for people: one block per node, pasted there, works without distlaunch."""

from collections.abc import Mapping
from shlex import quote

from distlaunch.job.spec import Env, JobSpec
from distlaunch.plan.layout import LaunchPlan, NodePlan, NodeRank, WorkerPlan, common_contract

_WAITING = ('failed=; for worker; do wait "$worker" || failed=${failed:-$?}; done', 'exit "${failed:-0}")')
"""The status is that of the first worker, in the order of ranks, that failed."""


def shell_text(plan: LaunchPlan, nodes: dict[NodeRank, list[WorkerPlan]]) -> str:
    """POSIX sh: ``# node NAME`` and a subshell per node; `nodes` maps node rank → its workers.

    Workers differ only by the variables of their own line. Values are exported by the shell, since
    everyone on the node can read the arguments of a program such as env.
    """
    blocks, binding = [_node_block(node, nodes[node.node_rank]) for node in plan.nodes], plan.spec.binding
    bound = [f"# {binding.key} is left out: distlaunch's agent does it on the node"] if binding else []
    return "\n".join([*remarks_on(plan.spec), *bound, *blocks])


def remarks_on(spec: JobSpec) -> list[str]:
    """Where the lines are to be run, and what they don't do."""
    inside = spec.container
    return [f"# to be run in a container of {inside.image} ({inside.runtime})"] if inside else []


def _node_block(node: NodePlan, workers: list[WorkerPlan]) -> str:
    shared = common_contract(workers)
    exports = [*job_exports(node.env), *_assignments(shared), *_default_exports(workers[0])]
    lines = [f"# node {node.label}", f"(cd {quoted_path(node.workdir)} || exit"]
    lines += [f"export {export}" for export in exports]
    lines += ["set --", *(_worker_line(worker, shared) for worker in workers)]
    return "\n".join([*lines, *_WAITING, ""])


def _worker_line(worker: WorkerPlan, shared: Mapping[str, str]) -> str:
    own = {name: value for name, value in worker.contract.items() if name not in shared}
    export = f"export {' '.join(_assignments(own))}; " if own else ""
    words = (quoted_path(w) if i in worker.paths else quote(w) for i, w in enumerate(worker.argv))
    # exec takes the program of that name, also where the shell has a word of its own for it.
    return f'({export}exec {" ".join(words)}) & set -- "$@" $!'


def quoted_path(path: str) -> str:
    """A path as a word for sh, which expands the ~ at its beginning."""
    home = "~/" if path.startswith("~/") else path if path == "~" else ""
    return home + (quote(path[len(home) :]) if path != home else "")


def _assignments(values: Mapping[str, str]) -> list[str]:
    return [f"{name}={quote(value)}" for name, value in sorted(values.items())]


def job_exports(env: Env) -> list[str]:
    """NAME=value words for export; what was inherited may be a secret, and the shell fills it in."""
    return [
        f'{name}="${{{name}?not set}}"' if value.inherited else f"{name}={quote(value.text)}"
        for name, value in env.items()
    ]


def _default_exports(worker: WorkerPlan) -> list[str]:
    missing = [name for name in worker.defaults if name not in worker.env]
    return [f'{name}="${{{name}-{worker.defaults[name]}}}"' for name in missing]

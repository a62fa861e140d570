"""A plan as shell commands for people: one block per node, pasted there, works without distlaunch."""

from shlex import quote

from distlaunch.job.spec import Env
from distlaunch.plan.layout import LaunchPlan, NodePlan, WorkerPlan


def shell_text(plan: LaunchPlan, nodes: dict[int, list[WorkerPlan]]) -> str:
    """POSIX sh: ``# node NAME`` and a subshell per worker; `nodes` maps node index → its workers."""
    return "\n".join(_node_block(node, nodes[node.node_rank]) for node in plan.nodes)


def _node_block(node: NodePlan, workers: list[WorkerPlan]) -> str:
    lines = [f"# node {node.label}"]
    lines += [_worker_line(worker) for worker in workers]
    return "\n".join([*lines, "wait", ""])


def _worker_line(worker: WorkerPlan) -> str:
    # export, not env: what env gets as arguments, everyone on the node can read in ps.
    exports = [f"{name}={quote(value)}" for name, value in worker.contract.items()]
    exports = [*_job_exports(worker.env), *exports]
    missing = [name for name in worker.defaults if name not in worker.env]
    exports += [f'{name}="${{{name}:-{worker.defaults[name]}}}"' for name in missing]
    return f"(cd {quote(worker.cwd)} && export {' '.join(exports)} && exec {_command(worker)}) &"


def _job_exports(env: Env) -> list[str]:
    """Values taken from the caller's environment are secrets as often as not: the shell fills them in."""
    return [
        f'{name}="${{{name}?not set}}"' if value.inherited else f"{name}={quote(value.text)}"
        for name, value in env.items()
    ]


def _command(worker: WorkerPlan) -> str:
    return " ".join(map(quote, worker.argv))

"""Plans as shell or torchrun commands that work without distlaunch."""

from collections.abc import Collection, Mapping
from shlex import quote

from distlaunch.contract import Rendezvous
from distlaunch.job.spec import Env, JobSpec, Program
from distlaunch.job.text import fill
from distlaunch.plan.other_launchers import agent_flags, program_flag, torch_literal, workers_flags
from distlaunch.plan.placement import LaunchPlan, NodePlan, NodeRank
from distlaunch.plan.workers import WorkerPlan, common, program_word

_WAITING = ('failed=; for worker; do wait "$worker" || failed=${failed:-$?}; done', 'exit "${failed:-0}")')
"""Shell lines that wait for all workers, then exit with the status of the lowest rank that failed."""


def shell_text(plan: LaunchPlan, nodes: dict[NodeRank, list[WorkerPlan]]) -> str:
    """Return a POSIX shell script with a comment, ``# node NAME``, and a subshell for each node.

    `nodes` contains the workers of each node, keyed by node rank. Workers differ only in the variables on
    their lines. The script exports the values instead of passing them to programs such as env, because every
    user on a node can read the arguments of programs.
    """
    binding = plan.spec.placement.binding
    bound = [f"# {binding.key} is left out: distlaunch's agent applies it on the node"] if binding else []
    blocks = (_node_block(node, nodes[node.node_rank]) for node in plan.nodes)
    return "\n".join([*_remarks(plan.spec), *bound, *blocks])


def _remarks(spec: JobSpec) -> list[str]:
    """Return comments on where to run the lines."""
    inside = spec.container
    return [f"# run this in a container of {inside.image} ({inside.runtime})"] if inside else []


def _node_block(node: NodePlan, workers: list[WorkerPlan]) -> str:
    """Return the lines for a node: a subshell that exports variables, starts the workers, and waits."""
    shared, env = common(worker.contract for worker in workers), common(worker.env for worker in workers)
    exports = [*_job_exports(env), *_assignments(shared), *_default_exports(workers[0])]
    lines = [f"# node {node.label}", f"(cd {_quoted_path(node.program.workdir)} || exit"]
    lines += [f"export {export}" for export in exports]
    lines += ["set --", *(_worker_line(worker, {*shared, *env}) for worker in workers)]
    return "\n".join([*lines, *_WAITING, ""])


def _worker_line(worker: WorkerPlan, shared: Collection[str]) -> str:
    own = {name: each.text for name, each in worker.env.items()} | {**worker.contract}
    assignments = _assignments({name: value for name, value in own.items() if name not in shared})
    export = f"export {' '.join(assignments)}; " if assignments else ""
    words = (_quoted_path(w) if i in worker.paths else quote(w) for i, w in enumerate(worker.argv))
    # exec runs the program even if the shell has a builtin of the same name.
    return f'({export}exec {" ".join(words)}) & set -- "$@" $!'


def _quoted_path(path: str) -> str:
    """Quote a path for sh, so that a leading ~ is still expanded."""
    home = "~/" if path.startswith("~/") else path if path == "~" else ""
    return home + (quote(path[len(home) :]) if path != home else "")


def _assignments(values: Mapping[str, str]) -> list[str]:
    return [f"{name}={quote(value)}" for name, value in sorted(values.items())]


def _job_exports(env: Env) -> list[str]:
    """Return NAME=value words for export. The shell expands inherited values, which may be secret."""
    return [
        f'{name}="${{{name}?not set}}"' if value.inherited else f"{name}={quote(value.text)}"
        for name, value in env.items()
    ]


def _default_exports(worker: WorkerPlan) -> list[str]:
    """Return NAME=value words for export. A variable that the shell already has keeps its value."""
    missing = [name for name in worker.defaults if name not in worker.env]
    return [f'{name}="${{{name}-{worker.defaults[name]}}}"' for name in missing]


# torchrun


def torchrun_text(plan: LaunchPlan, port: int) -> str:
    """Return the equivalent torchrun command lines, one per node, with comments on differences."""
    spec = plan.spec
    run_id = spec.rendezvous.id or spec.name
    meeting = Rendezvous(plan.master_addr, port, run_id, plan.backend, max_restarts=spec.restarts.most)
    lines = []
    for node in plan.nodes:
        lines += [f"# node {node.label}", _torchrun_line(plan, node, meeting), ""]
    return "\n".join([*_torchrun_remarks(plan), *lines])


def _torchrun_remarks(plan: LaunchPlan) -> list[str]:
    remarks = _remarks(plan.spec)
    in_env = "{local_rank}" in "".join(each.text for each in plan.spec.program.env.values())
    words = ("{" + word + "}" for word in plan.spec.placeholders if in_env or word != "local_rank")
    if names := ", ".join(words):
        remarks.append(f"# torchrun can't fill in {names}: the script must read them itself")
    binding = plan.spec.placement.binding
    if binding and binding.key == "cpu_binding":
        remarks.append("# cpu_binding is left out: torchrun binds only by NUMA node")
    return remarks


def _torchrun_line(plan: LaunchPlan, node: NodePlan, meeting: Rendezvous) -> str:
    """Return the torchrun command of a node, in a subshell with its workdir and variables."""
    flags = _flags(plan, node, meeting)
    own = node.program
    env = {name: each._replace(text=fill(each.text, every=False)) for name, each in own.env.items()}
    exports = _job_exports(env)
    export = f"export {' '.join(exports)} && " if exports else ""
    program = program_word(node)
    program = _quoted_path(program) if own.placed else quote(program)
    named = own.python  # otherwise, torchrun is looked up in PATH
    torchrun = [_quoted_path(named), "-m", "torch.distributed.run"] if named else ["torchrun"]
    args = map(quote, map(torch_argument, own.arguments))
    words = " ".join([*torchrun, *map(quote, flags), *dashes(own), program, *args])
    return f"(cd {_quoted_path(own.workdir)} && {export}exec {words})"


def dashes(program: Program) -> list[str]:
    """Return `--` if it must precede the program: torchrun would remove one that directly follows it."""
    return ["--"] if program.arguments[:1] == ("--",) else []


def torch_argument(text: str) -> str:
    """Return an argument for torchrun, which fills in `${local_rank}`."""
    return torch_literal(fill(text, {"local_rank": "\0"}.get)).replace("\0", "${local_rank}")


def _flags(plan: LaunchPlan, node: NodePlan, meeting: Rendezvous) -> list[str]:
    spec = plan.spec
    if spec.rendezvous.etcd:
        size = (len(plan.nodes), node.torch_ranks)
        return [*agent_flags(spec, node.program, size, meeting), *program_flag(node.program)]
    return [
        f"--nnodes={len(plan.nodes)}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={node.procs}",
        f"--master-addr={plan.master_addr}",
        f"--master-port={meeting.master_port}",
        *([f"--shutdown-timeout={spec.limits.stop_s:.0f}"] if "timeouts.stop" in spec.places else []),
        *job_flags(spec, node.program),
    ]


def job_flags(spec: JobSpec, program: Program) -> list[str]:
    """Return the torchrun flags, the same on each node, for job settings that differ from the defaults."""
    binding = spec.placement.binding
    return [
        *([f"--rdzv-id={spec.rendezvous.id}"] if spec.rendezvous.id else []),
        *([f"--max-restarts={spec.restarts.most}"] if spec.restarts.most else []),
        *workers_flags(spec, program),
        *([f"--numa-binding={binding.how}"] if binding and binding.key == "numa_binding" else []),
        *program_flag(program),
    ]

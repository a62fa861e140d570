"""A plan as torchrun commands: one line per node."""

from shlex import quote

from distlaunch.contract import Rendezvous
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import placeholders_in
from distlaunch.plan.layout import LaunchPlan, NodePlan, program_word
from distlaunch.plan.other_launchers import agent_flags, arguments, program_flag, workers_flags
from distlaunch.plan.shell_text import job_exports, quoted_path, remarks_on


def torchrun_text(plan: LaunchPlan, port: int) -> str:
    """The equivalent torchrun lines, with comments where torchrun has no equal."""
    spec = plan.spec
    run_id = spec.rendezvous_id or spec.name
    meeting = Rendezvous(plan.master_addr, port, run_id, plan.backend, max_restarts=spec.restarts.most)
    lines = []
    for node in plan.nodes:
        lines += [f"# node {node.label}", _line(plan, node, meeting), ""]
    return "\n".join([*_remarks(plan), *lines])


def _remarks(plan: LaunchPlan) -> list[str]:
    remarks = remarks_on(plan.spec)
    if used := placeholders_in([*plan.spec.program.words[1:], *plan.spec.args]):
        names = ", ".join("{" + name + "}" for name in used)
        remarks.append(f"# torchrun can't fill in {names}: the script must read them itself")
    binding = plan.spec.binding
    if binding and binding.key == "cpu_binding":
        remarks.append("# cpu_binding is left out: torchrun binds only by NUMA node")
    return remarks


def _line(plan: LaunchPlan, node: NodePlan, meeting: Rendezvous) -> str:
    spec = plan.spec
    flags = _flags(plan, node, meeting)
    exports = job_exports(node.env)
    export = f"export {' '.join(exports)} && " if exports else ""
    program = program_word(spec, node)
    program = quoted_path(program) if spec.program.placed else quote(program)
    named = spec.pool[node.node].python or spec.python  # else the one in PATH
    torchrun = [quoted_path(named), "-m", "torch.distributed.run"] if named else ["torchrun"]
    words = " ".join([*torchrun, *map(quote, flags), program, *map(quote, arguments(spec))])
    return f"(cd {quoted_path(node.workdir)} && {export}exec {words})"


def _flags(plan: LaunchPlan, node: NodePlan, meeting: Rendezvous) -> list[str]:
    spec = plan.spec
    if spec.etcd:
        return [*agent_flags(spec, len(plan.nodes), node.torch_ranks, meeting), *program_flag(spec)]
    return [
        f"--nnodes={len(plan.nodes)}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={node.procs}",
        f"--master-addr={plan.master_addr}",
        f"--master-port={meeting.master_port}",
        *([f"--shutdown-timeout={spec.timeouts.stop_s:.0f}"] if "timeouts.stop" in spec.places else []),
        *job_flags(spec),
    ]


def job_flags(spec: JobSpec) -> list[str]:
    """torchrun's flags, on each node, for what the job wants otherwise than torchrun does."""
    binding = spec.binding
    return [
        *([f"--rdzv-id={spec.rendezvous_id}"] if spec.rendezvous_id else []),
        *([f"--max-restarts={spec.restarts.most}"] if spec.restarts.most else []),
        *workers_flags(spec),
        *([f"--numa-binding={binding.how}"] if binding and binding.key == "numa_binding" else []),
        *program_flag(spec),
    ]

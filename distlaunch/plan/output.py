"""The destination of each rank's output: the console, with or without a prefix, and a file."""

from itertools import product

from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import Std, TorchrunLogs
from distlaunch.plan.placement import LaunchPlan, NodePlan

STREAMS = ("stdout", "stderr")


class Destination(Frozen):
    """The destination of one stream of one rank.

    If `prefix` is None, the bytes are unchanged. `file` is relative to the run directory."""

    shown: bool
    prefix: str | None
    file: str | None

    @property
    def direct(self) -> bool:
        """Return whether the output goes only to the console, unchanged."""
        return self.shown and self.prefix is None and self.file is None


def destinations(plan: LaunchPlan, attempt: int) -> dict[tuple[int, int], Destination]:
    """Return the destinations for an attempt with this plan, keyed by rank and stream (0 stdout, 1 stderr).

    Ranks on nodes whose own launchers show and keep the output are left out.
    """
    logs = plan.spec.logs
    shown, found = shown_ranks(plan), {}
    for node in plan.nodes:
        for rank, stream in product(node.ranks, range(2)):
            if not logs.torchrun:
                file = log_file(attempt, rank, stream)
                found[rank, stream] = Destination(rank in shown, f"[{node.label}:{rank}] ", file)
            elif node.logs is None:
                found[rank, stream] = _by_torchrun(logs.torchrun, plan, node, rank, stream, attempt)
    return found


def shown_ranks(plan: LaunchPlan) -> range | tuple[int, ...]:
    """Return the ranks whose output the console shows."""
    shown = plan.spec.logs.console
    ranges = {"all": range(plan.world_size), "rank0": range(1), "none": range(0)}
    return ranges[shown] if isinstance(shown, str) else shown


def log_file(attempt: int, rank: int, stream: int) -> str:
    """Return the path of a stream's file in the run directory. Only integers in it come from the job."""
    name = f"rank{rank}.{('out', 'err')[stream]}"
    return f"attempt{attempt}/{name}" if attempt else name


def _by_torchrun(
    logs: TorchrunLogs, plan: LaunchPlan, node: NodePlan, rank: int, stream: int, attempt: int
) -> Destination:
    """Apply torchrun's rules: redirect = file only, tee = both, with a prefix, neither = console only."""
    local_rank = rank - node.first_rank
    tee, redirected = (_has(std, local_rank, stream) for std in (logs.tee, logs.redirects))
    wanted = not logs.local_ranks or local_rank in logs.local_ranks
    file = f"attempt_{attempt}/{local_rank}/{STREAMS[stream]}.log" if tee or redirected else None
    prefix = _prefix(logs.prefix, plan.spec.program.role, local_rank, rank) if tee else None
    return Destination(wanted and (tee or not redirected), prefix, file)


def _has(std: Std, local_rank: int, stream: int) -> bool:
    """Return whether a torchrun setting (bits: 1 stdout, 2 stderr) applies to a stream of a rank."""
    chosen = std if isinstance(std, int) else std.get(local_rank, 0)
    return bool(chosen & (1, 2)[stream])


def _prefix(template: str, role: str, local_rank: int, rank: int) -> str:
    from string import Template  # only `distlaunch torchrun` needs it

    return Template(template).safe_substitute(role_name=role, local_rank=local_rank, rank=rank)

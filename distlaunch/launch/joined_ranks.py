"""The ranks of a launcher that joined, and the destinations of their output."""

import os
import sys
from typing import TYPE_CHECKING

from distlaunch.agent import messages
from distlaunch.contract import Rendezvous
from distlaunch.job.spec import JobSpec
from distlaunch.launch.joined_agent import PATIENCE_S, STOP_QUIETLY, Part
from distlaunch.observers.console import Console
from distlaunch.plan.placement import Facts, LaunchPlan, NodeRank, node_plan
from distlaunch.plan.workers import Destination, binding_of, destinations, worker_specs, workers
from distlaunch.supervisor.checking import own_needs

if TYPE_CHECKING:
    from distlaunch.observers.run_directory import RunDirectory


class OwnRanks(Part):
    """The ranks of this node, for `joined_agent`. `spec` is the part of the job on this node.

    The launcher has a torchrun command line. The methods override those for a scheduler's task.
    """

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(())
        self._spec = spec
        self._plan = _plan(spec, 0)
        self.procs, self.role = self._plan.nodes[0].procs, spec.program.role
        self._directory: RunDirectory | None = None
        self._console: Console | None = None
        self._first_rank = 0
        self._goes_to: dict[tuple[int, int], Destination] = {}

    def logs(self, run_id: str, node: int) -> str:
        """Return the directory for logs; "" = this command line saves no output."""
        from distlaunch.launch.start import run_directory  # few launchers save output

        if self._directory is None and any(each.file for each in destinations(self._plan, 0).values()):
            # The launcher may join again.
            self._directory = run_directory(self._spec, f"{run_id}-node{node}-{os.urandom(2).hex()}")
        return self._directory.path if self._directory else ""

    def workers(self, ranks: messages.StartWorkers) -> tuple[messages.WorkerSpec, ...]:
        """Return the command line of each rank, and whether the rank shares this process's streams."""
        self._first_rank = int({**ranks.env, **ranks.workers[0].env}["RANK"])
        self._plan = _plan(self._spec, self._first_rank)
        (part,) = self._plan.nodes
        self._goes_to = destinations(self._plan, ranks.attempt)
        for each in self._goes_to.values():
            if each.file and self._directory:
                self._directory.append(each.file, b"")  # like torchrun, even for a stream without output
        if self._console:
            self._console.finish_lines()  # of ranks that have exited
        planned = workers(self._plan, part, Rendezvous("", 0, "", "gloo"))
        _, own = worker_specs(self._plan, part, planned, ranks.attempt)
        pairs = zip(own, ranks.workers, strict=True)
        return tuple(mine._replace(env=theirs.env, defaults=theirs.defaults) for mine, theirs in pairs)

    def needs(self) -> messages.Needs:
        """Return the program named on the command line, and the directories it needs."""
        return own_needs(self._spec, 0)

    def binding(self) -> messages.Binding | None:
        """Return the binding that the command line requests."""
        from distlaunch.agent.gpus import gpu_count

        binding = binding_of(self._spec, self._plan.nodes[0])
        return binding and binding._replace(gpus=gpu_count())

    def show(self, attempt: int, local_rank: int, stream: int, data: bytes) -> None:
        """Print output, save it, or both, according to torchrun's flags."""
        rank = self._first_rank + local_rank
        goes_to = self._goes_to[rank, stream]
        if goes_to.file and self._directory:
            self._directory.append(goes_to.file, data)
        if goes_to.shown:
            self._shown().output(rank, stream, data, goes_to.prefix)

    def _shown(self) -> Console:
        """Return the console. It has a thread, so it is created on first use, in the process that prints."""
        if self._console is None:
            # If the reader exits, the job ends, as a pipeline does.
            self._console = Console(lambda: os.kill(os.getpid(), STOP_QUIETLY))
        return self._console

    def say(self, text: str) -> None:
        """Print messages from distlaunch."""
        self._shown().say(text)

    def close(self) -> None:
        """Print and save the rest of the output."""
        sys.stdout.flush()
        log = self._directory
        if log:
            log.close()
        if log and log.lost:
            self.say(f"{log.lost_bytes} bytes could not be written to {log.path}: {log.trouble}")
        elif log and not os.path.exists(log.path):
            what = "if it was removed, its logs are lost"
            self.say(f"{log.path} was removed or renamed during the run; {what}")
        if self._console:
            self._console.finish_lines()
            self._console.close(lambda silent_s: silent_s < PATIENCE_S)


def _plan(spec: JobSpec, first_rank: int) -> LaunchPlan:
    """Return a plan of this node alone, for its command lines. The controller decides everything else."""
    facts = Facts(spec.program.python or "", 0)
    part = node_plan(spec._replace(backend="gloo"), facts, 0, NodeRank(0), first_rank)
    return LaunchPlan(spec, (part,), part.procs, "gloo", "", None)

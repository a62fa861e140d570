"""What a launcher that joined runs on its node, and what becomes of the output there."""

import os
import sys
from typing import TYPE_CHECKING

from distlaunch.agent import messages
from distlaunch.contract import Rendezvous
from distlaunch.job.spec import JobSpec
from distlaunch.launch.joined import STOP_QUIETLY, Part
from distlaunch.observers.console import Console
from distlaunch.plan.layout import Facts, LaunchPlan, NodeRank, node_plan, workers
from distlaunch.plan.output import Destination, destinations
from distlaunch.supervisor.codec import binding_of, shared_descriptors

if TYPE_CHECKING:
    from distlaunch.observers.run_folder import RunFolder

PATIENCE_S = 5.0


class OwnRanks(Part):
    """This node's ranks, as `distlaunch.launch.joined.Part` has it; `spec` is this node's part of the job."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._plan = _plan(spec, 0)
        self.procs = self._plan.nodes[0].procs
        self._folder: RunFolder | None = None
        self._console: Console | None = None
        self._first_rank = 0
        self._goes_to: dict[tuple[int, int], Destination] = {}

    def logs(self, run_id: str, node: int) -> str:
        """The folder, if this command line keeps any output."""
        from distlaunch.launch.start import run_folder  # few do

        if self._folder is None and any(each.file for each in destinations(self._plan, 0).values()):
            part = f"{run_id}-node{node}-{os.urandom(2).hex()}"  # it may join again
            self._folder = run_folder(self._spec, part)
        return self._folder.path if self._folder else ""

    def workers(self, ranks: messages.StartRanks) -> tuple[messages.WorkerSpec, ...]:
        """The command line of each rank, and whether it shares this process's streams."""
        self._first_rank = int({**ranks.env, **ranks.workers[0].env}["RANK"])
        self._plan = _plan(self._spec, self._first_rank)
        (part,) = self._plan.nodes
        self._goes_to = destinations(self._plan, ranks.generation)
        for each in self._goes_to.values():
            if each.file and self._folder:
                self._folder.append(each.file, b"")  # as torchrun has it, also for a stream that says nothing
        if self._console:
            self._console.finish_lines()  # of ranks that have ended
        shares = shared_descriptors(self._plan, part, ranks.generation)
        planned = workers(self._plan, part, Rendezvous("", 0, "", "gloo"))
        return tuple(
            messages.WorkerSpec(
                local_rank=each.local_rank,
                argv=own.argv,
                cwd=own.cwd,
                paths=own.paths,
                env=each.env,
                defaults=each.defaults,
                one_device=self._spec.one_device,
                shares=shares[own.rank],
            )
            for each, own in zip(ranks.workers, planned, strict=True)
        )

    def binding(self) -> messages.Binding | None:
        """As the command line has it."""
        from distlaunch.agent.gpus import gpu_count

        binding = binding_of(self._spec, self._plan.nodes[0])
        return binding and binding._replace(gpus=gpu_count())

    def show(self, generation: int, local_rank: int, stream: int, data: bytes) -> None:
        """Print it, or keep it, or both, as torchrun's flags have it."""
        rank = self._first_rank + local_rank
        goes_to = self._goes_to[rank, stream]
        if goes_to.file and self._folder:
            self._folder.append(goes_to.file, data)
        if goes_to.shown:
            self._shown().output(rank, stream, data, goes_to.prefix)

    def _shown(self) -> Console:
        """Made where there is something to show, and by the process that shows it: it has a thread."""
        if self._console is None:
            # A reader that leaves ends the job, as it ends a pipeline.
            self._console = Console(lambda: os.kill(os.getpid(), STOP_QUIETLY))
        return self._console

    def say(self, text: str) -> None:
        """Print distlaunch's own words."""
        self._shown().say(text)

    def close(self) -> None:
        """Show and keep the rest."""
        sys.stdout.flush()
        if self._console:
            self._console.finish_lines()
            self._console.close(lambda silent_s: silent_s < PATIENCE_S)
        if self._folder:
            self._folder.close()


def _plan(spec: JobSpec, first_rank: int) -> LaunchPlan:
    """This node alone, as far as its own command line matters: the controller chooses all else."""
    facts = Facts(spec.python or "", 0)
    part = node_plan(spec._replace(backend="gloo"), facts, 0, NodeRank(0), first_rank)
    return LaunchPlan(spec, (part,), part.procs, "gloo", "", None)

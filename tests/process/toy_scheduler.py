"""A scheduler of another package: its queue is a directory, TOY_QUEUE, whose scripts others run."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlaunch.job.spec import AllocatedNode, Allocation, JobSpec
from distlaunch.job.types import LINE, Field, Record
from distlaunch.schedulers import NAMED
from distlaunch.schedulers.base import NODES, Call, Scheduler
from distlaunch.schedulers.queue import CANCELLED, Queued
from distlaunch.transports.transport import Command


class Toy(Scheduler):
    """Its hosts are in TOY_HOSTS, and all of them here."""

    name, title = "toy", "Toy"
    section = Record({"nodes": NODES, "color": Field(LINE, "The color of the nodes.")})

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation:
        nodes = tuple(AllocatedNode(host, procs=1) for host in environ["TOY_HOSTS"].split())
        return Allocation(self.name, self.title, environ["TOY_JOB"], nodes, queued=True)

    def command(self, host: str) -> Command:
        return Command(host, ("env", "TOY_HOST={host}"))

    def script(self, spec: JobSpec, call: Call, followed: bool = False) -> str:
        color = self.asked(spec).get("color", "any")
        return f"#!/bin/sh\n# color: {color}\nexport {NAMED}=toy\n{shlex.join(call.words)}\n"

    def submit(self, script: str) -> str:
        job = str(len(list(_queue().iterdir())) + 1)
        (_queue() / job).write_text(Path(script).read_text())
        return job

    def look(self, jobs: Sequence[str]) -> dict[str, Queued]:
        return {job: Queued("in line", "", "waits") for job in jobs if (_queue() / job).exists()}

    def cancel(self, job: str, at_once: bool = False) -> None:
        (_queue() / job).rename(_queue() / f"{job}.{CANCELLED}")


def _queue() -> Path:
    return Path(os.environ["TOY_QUEUE"])


scheduler = Toy()

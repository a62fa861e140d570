"""Opens the link to a node of a job: the transport's command line, the interpreters, the agent's text."""

import os
import sys

from distlaunch.job.spec import JobSpec
from distlaunch.rim.bundle import bundle_for
from distlaunch.rim.link import Link
from distlaunch.transport.argv import argv_of
from distlaunch.transport.boot import boot_text, candidates_text


def open_link(spec: JobSpec, index: int, run_id: str) -> Link:
    """Start the transport to node `index`; its agent will say hello."""
    node = spec.nodes[index]
    named = node.python or spec.python
    interpreters = [named] if named else [sys.executable, "python3"]
    nonce = os.urandom(16).hex()
    bundle = bundle_for(same_interpreter=node.local and not named)
    opening = candidates_text(interpreters) + boot_text(bundle, nonce, index, run_id)
    return Link(argv_of(node.reach, spec.ssh), opening, nonce)

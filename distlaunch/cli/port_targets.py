"""Arguments of `check-port`: job files and host:port, distinguished by their form."""

import os
import socket
from collections.abc import Sequence

from distlaunch.cli.job_file import STDIN, load_job
from distlaunch.errors import UsageError
from distlaunch.job.document import flow_text
from distlaunch.job.nodes import parse_endpoint
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.job.text import is_loopback
from distlaunch.launch.addresses import plan_without_nodes, ssh_address
from distlaunch.launch.port_check import PortReport, check_port
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import SshOptions


def reports_on(
    targets: Sequence[str], overrides: Sequence[str], ssh_config: str | None = None
) -> list[PortReport]:
    """Return a report for each target, reached with `ssh_config` or with the job's settings.

    Raises `DistlaunchError`.
    """
    config = ssh_config and os.path.abspath(os.path.expanduser(ssh_config))
    if config and not os.path.exists(config):
        raise UsageError(f"--ssh-config {ssh_config}: no such file")
    return [_report_on(target, overrides, config) for target in targets]


def _report_on(target: str, overrides: Sequence[str], config: str | None) -> PortReport:
    """Test the ports of a job file, or the port of HOST:PORT without a job."""
    if target == STDIN or os.path.exists(target) or target.endswith((".yaml", ".yml")):
        # Ports don't depend on GPUs, so the nodes needn't count them.
        spec = load_job(target, [*overrides, *([f"ssh.config={flow_text(config)}"] if config else [])])
        known = spec._replace(
            nodes=tuple(n._replace(gpus=n.gpus or 0, procs=n.procs or 1) for n in spec.nodes)
        )
        plan = plan_without_nodes(known._replace(backend="gloo"))
        return check_port(spec, plan.master_addr, spec.rendezvous.port)
    try:
        host, port = parse_endpoint(target)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if host is None or port is None:
        number = target.strip(":")
        hint = f"; write localhost:{number} for a port on this machine" if number.isdecimal() else ""
        raise UsageError(f"{target}: neither a job file nor host:port{hint}")
    # This machine by any of its names, or a host reached over SSH.
    local = is_loopback(host) or host in (socket.gethostname(), socket.getfqdn())
    node = NodeSpec(host) if local else NodeSpec(host, Ssh(host, options=SshOptions(config=config)))
    lone = JobSpec(host, (node,), Program("command", ("true",), workdir=os.getcwd()), Logs(os.getcwd()))
    return check_port(lone, ssh_address(lone) or host, port)

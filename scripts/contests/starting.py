"""How long it takes until work that is nothing is done: here, on hosts over ssh, and once more."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from .contest import Bar, Contest, Timed, command, shell

RANKS = 4
_SCRIPT = Path(sys.executable).with_name("distlaunch")
OURS = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "distlaunch"]
"""As people start it, where it is installed."""
_BY_TORCHRUNX = f"""\
import torchrunx

def nothing():
    pass

if __name__ == "__main__":
    torchrunx.Launcher(hostnames=["localhost"], workers_per_host={RANKS}, backend=None).run(nothing)
"""
"""It starts functions, not scripts."""


def here(folder: Path) -> Contest:
    """A script that does nothing, in four ranks on this machine."""
    script, job = folder / "noop.py", folder / "noop.yaml"
    script.write_text("")
    job.write_text(f"script: noop.py\ngpus_per_node: 0\nprocs_per_node: {RANKS}\n")
    near = Path(sys.executable).parent
    loop = f"for i in $(seq {RANKS}); do {sys.executable} {script} & done; wait"
    torchs = [f"--nproc-per-node={RANKS}", str(script)]
    ways: dict[str, Timed] = {
        "distlaunch": command([*OURS, "run", "--quiet", str(job)]),
        "distlaunch torchrun": command([*OURS, "torchrun", *torchs]),
        "shell loop": shell(loop),
    }
    peers = {
        "mpirun": [*_mpirun(), "-n", str(RANKS), sys.executable, str(script)],
        "torchrun": [str(near / "torchrun"), *torchs],
        "accelerate": [
            *(str(near / "accelerate"), "launch", "--cpu", f"--num_processes={RANKS}", "--num_machines=1"),
            *("--mixed_precision=no", "--dynamo_backend=no", str(script)),
        ],
        "DeepSpeed": [str(near / "deepspeed"), f"--num_gpus={RANKS}", str(script)],
        "torchrunx": [sys.executable, str(folder / "by_torchrunx.py")],
    }
    found = {name: argv for name, argv in peers.items() if shutil.which(argv[0])}
    if find_spec("torchrunx") is None:
        del found["torchrunx"]
    (folder / "by_torchrunx.py").write_text(_BY_TORCHRUNX)
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    ways |= {name: command(argv, env=environ) for name, argv in found.items()}
    bars = (Bar("mpirun", 1.4, 1.0), Bar("torchrun", 1 / 16, 1 / 20, ours="distlaunch torchrun"))
    title = f"a script that does nothing, {RANKS} ranks here"
    return Contest(title, ways, bars, [name for name in peers if name not in found])


def _mpirun() -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe"]


def on_hosts(folder: Path, ssh_config: Path, count: int, bar: Bar) -> Contest:
    """A program that does nothing, on so many hosts over ssh."""
    job = folder / f"hosts{count}.yaml"
    job.write_text(
        f"command: ['true']\ngpus_per_node: 0\nnodes: ['host[1-{count}]']\nssh: {{config: {ssh_config}}}\n"
    )
    names = f"host[1-{count}]"
    bare = f"printf 'host%s\\n' $(seq {count}) | xargs -P{count} -I@ ssh -F {ssh_config} @"
    python = f"{sys.executable} -I -S -c pass"
    ways = {
        "distlaunch": command([*OURS, "run", "--quiet", str(job)]),
        "parallel ssh": shell(f"{bare} true"),
        "parallel ssh, Python starts": shell(f"{bare} {python}"),
    }
    environ = {**os.environ, "PDSH_SSH_ARGS": f"-F {ssh_config} %h"}
    peers = {"pdsh": ["pdsh", "-R", "ssh", "-w", names, "true"]}
    peers["clush"] = ["clush", "-o", f"-F {ssh_config}", "-w", names, "true"]
    found = {name: argv for name, argv in peers.items() if shutil.which(argv[0])}
    ways |= {name: command(argv, env=environ) for name, argv in found.items()}
    missing = [name for name in peers if name not in found]
    return Contest(f"a program that does nothing, {count} hosts over ssh", ways, (bar,), missing)


def again(folder: Path, ssh_config: Path) -> Contest:
    """The second launch over connections that are kept open; the first opens them."""
    text = "command: ['true']\ngpus_per_node: 0\nnodes: ['host[1-3]']\n"
    first, second = folder / "first.yaml", folder / "second.yaml"
    first.write_text(f"{text}ssh: {{config: {ssh_config}}}\n")
    second.write_text(f"{text}ssh: {{config: {ssh_config}, persist: 60s}}\n")
    ways = {
        "with ssh.persist": command([*OURS, "run", "--quiet", str(second)]),
        "without": command([*OURS, "run", "--quiet", str(first)]),
    }
    return Contest("3 hosts over ssh, a launch after another", ways, (Bar("without", 1 / 3, 1 / 5),))


def on_slurm(folder: Path, job_id: str) -> Contest:
    """A program that does nothing, on the three nodes of an allocation."""
    job = folder / "slurm.yaml"
    job.write_text("command: ['true']\ngpus_per_node: 0\nnodes: 3\n")
    environ = {**os.environ, "SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "host[1-3]"}
    ways = {
        "distlaunch": command([*OURS, "run", "--quiet", str(job)], env=environ),
        "srun": command(["srun", f"--jobid={job_id}", "--overlap", "--nodes=3", "true"]),
    }
    return Contest("a program that does nothing, 3 nodes of Slurm", ways, (Bar("srun", 6.0),))

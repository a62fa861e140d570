"""Measures how long programs that do nothing take: on this machine, over ssh, and a second time."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from .contest import Bar, Contest, Timed, command, shell

RANKS = 4
_SCRIPT = Path(sys.executable).with_name("distlaunch")
OURS = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "distlaunch"]
"""The installed command if there is one, as users run it."""
_BY_TORCHRUNX = f"""\
import torchrunx

def nothing():
    pass

if __name__ == "__main__":
    torchrunx.Launcher(hostnames=["localhost"], workers_per_host={RANKS}, backend=None).run(nothing)
"""
"""A script for torchrunx, which starts functions instead of scripts."""
TASKS = 256
_GATHERS = """\
import os
from distlaunch.cli.exec_task import finalize, gathering_of, job_of, task_of
task = task_of(os.environ)
gathering = gathering_of(task, False, os.environ)
from distlaunch.signals import Signals
with Signals() as signals:
    if gathering.serves:
        from distlaunch.launch.gather import gather
        met = gather(job_of(task, ["true"], gathering.arrival), gathering, signals, print)
        links = [met.listener.link(rank, "run", "host") for rank in range(1, task.size)]
    else:
        from distlaunch.launch.join import Launcher
        from distlaunch.launch.join import Prover
        Launcher(gathering, Prover(os.environ, gathering.arrival.name), signals, print).seated()
if task.manager is not None:
    finalize(task.manager)
"""
"""A script whose tasks join, like those of `exec`, and then exit."""


def here(directory: Path) -> Contest:
    """Four ranks on this machine run a script that does nothing."""
    script, job = directory / "noop.py", directory / "noop.yaml"
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
        "Open MPI": [*_open_mpi(), "-n", str(RANKS), sys.executable, str(script)],
        "MPICH": ["mpirun.mpich", "-n", str(RANKS), sys.executable, str(script)],
        "torchrun": [str(near / "torchrun"), *torchs],
        "accelerate": [
            *(str(near / "accelerate"), "launch", "--cpu", f"--num_processes={RANKS}", "--num_machines=1"),
            *("--mixed_precision=no", "--dynamo_backend=no", str(script)),
        ],
        "DeepSpeed": [str(near / "deepspeed"), f"--num_gpus={RANKS}", str(script)],
        "torchrunx": [sys.executable, str(directory / "by_torchrunx.py")],
    }
    found = {name: argv for name, argv in peers.items() if shutil.which(argv[0])}
    if find_spec("torchrunx") is None:
        del found["torchrunx"]
    (directory / "by_torchrunx.py").write_text(_BY_TORCHRUNX)
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    ways |= {name: command(argv, env=environ) for name, argv in found.items()}
    bars = (Bar("Open MPI", 1.4, 1.0), Bar("torchrun", 1 / 16, 1 / 20, ours="distlaunch torchrun"))
    title = f"a script that does nothing, {RANKS} ranks here"
    return Contest(title, ways, bars, [name for name in peers if name not in found])


def _open_mpi() -> list[str]:
    """Return the beginning of Open MPI's command line. Debian has both MPIs, with different names."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [next(filter(shutil.which, ("mpirun.openmpi", "mpirun")), "mpirun"), *root, "--oversubscribe"]


def on_hosts(directory: Path, ssh_config: Path, count: int, bar: Bar) -> Contest:
    """A program does nothing on `count` hosts over ssh, with and without the checks that `run` makes."""
    job = directory / f"hosts{count}.yaml"
    job.write_text(
        f"command: ['true']\ngpus_per_node: 0\nnodes: ['host[1-{count}]']\nssh: {{config: {ssh_config}}}\n"
    )
    names = f"host[1-{count}]"
    bare = f"printf 'host%s\\n' $(seq {count}) | xargs -P{count} -I@ ssh -F {ssh_config} @"
    python = f"{sys.executable} -I -S -c pass"
    ways = {
        "distlaunch": command([*OURS, "run", "--quiet", str(job)]),
        "distlaunch --no-check": command([*OURS, "run", "--quiet", "--no-check", str(job)]),
        "parallel ssh": shell(f"{bare} true"),
        "parallel ssh, Python starts": shell(f"{bare} {python}"),
    }
    environ = {**os.environ, "PDSH_SSH_ARGS": f"-F {ssh_config} %h"}
    peers = {"pdsh": ["pdsh", "-R", "ssh", "-w", names, "true"]}
    peers["clush"] = ["clush", "-o", f"-F {ssh_config}", "-w", names, "true"]
    found = {name: argv for name, argv in peers.items() if shutil.which(argv[0])}
    ways |= {name: command(argv, env=environ) for name, argv in found.items()}
    missing = [name for name in peers if name not in found]
    bars = (bar, Bar("distlaunch --no-check", 1.03))
    return Contest(f"a program that does nothing, {count} hosts over ssh", ways, bars, missing)


def again(directory: Path, ssh_config: Path) -> Contest:
    """The second launch uses connections that the first launch opened."""
    text = "command: ['true']\ngpus_per_node: 0\nnodes: ['host[1-3]']\n"
    first, second = directory / "first.yaml", directory / "second.yaml"
    first.write_text(f"{text}ssh: {{config: {ssh_config}}}\n")
    second.write_text(f"{text}ssh: {{config: {ssh_config}, persist: 60s}}\n")
    ways = {
        "with ssh.persist": command([*OURS, "run", "--quiet", str(second)]),
        "without": command([*OURS, "run", "--quiet", str(first)]),
    }
    return Contest("3 hosts over ssh, a launch after another", ways, (Bar("without", 1 / 3, 1 / 5),))


def on_slurm(directory: Path, job_id: str) -> Contest:
    """A program does nothing on the three nodes of an allocation."""
    job = directory / "slurm.yaml"
    job.write_text("command: ['true']\ngpus_per_node: 0\nnodes: 3\n")
    environ = {**os.environ, "SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "host[1-3]"}
    srun = ["srun", f"--jobid={job_id}", "--overlap", "--nodes=3", "--ntasks=3"]
    where = ["--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=host1:29477"]
    ways = {
        "distlaunch": command([*OURS, "run", "--quiet", str(job)], env=environ),
        "srun": command([*srun, "true"]),
        "srun distlaunch torchrun": command([*srun, *OURS, "torchrun", *where, "--no-python", "true"]),
    }
    bars = (Bar("srun", 6.0), Bar("distlaunch", 1.5, ours="srun distlaunch torchrun"))
    return Contest("a program that does nothing, 3 nodes of Slurm", ways, bars)


def gathering(directory: Path) -> Contest:
    """All tasks of mpirun join the first task."""
    (directory / "gather.py").write_text(_GATHERS)
    # Open MPI sometimes stalls with that many tasks on few cores.
    hydra = shutil.which("mpirun.mpich")
    tasks = [*([hydra] if hydra else _open_mpi()), "-n", str(TASKS)]
    ways = {
        "distlaunch exec": command([*tasks, sys.executable, str(directory / "gather.py")]),
        "mpirun": command([*tasks, "true"]),
        "mpirun, Python starts": command([*tasks, sys.executable, "-c", "pass"]),
        # 1.5 times this is 1.5 times mpirun and a second.
        "mpirun and 2/3 s": shell(f"{' '.join(tasks)} true; sleep 0.667"),
    }
    return Contest(f"{TASKS} tasks of mpirun's join", ways, (Bar("mpirun and 2/3 s", 1.5),))

"""Containers: the command line for each runtime, and refused job files."""

import shlex

import pytest

from distlaunch.plan.placement import Facts, NodeRank, make_plan
from distlaunch.plan.shell_text import shell_text, torchrun_text
from distlaunch.plan.workers import meeting_of, workers
from distlaunch.transports.container import Container, Runtime, advice_for, entry, in_step
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.transports.handshake import ENTER, SCRIPT
from distlaunch.transports.slurm import SlurmStep
from tests.unit.samples import Load, Problems

QUOTES = "a 'b' \"c\" $HOME `d` \\ !e"


def words_of(container: Container, workdir: str = "/work") -> list[str]:
    """The words of the line's last command; what the node's shell would evaluate stays as it is."""
    line = entry(container, workdir).decode()
    assert line.startswith(ENTER) and line.count("\n") == 1 and line.endswith("\n")
    return shlex.split(line[line.index(f"; exec {container.runtime} ") :])[2:]


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_docker_and_podman_command_lines(runtime: Runtime) -> None:
    container = Container("img:1", runtime, ("/data", "/a:/b:ro"), ("--shm-size=8g",), {"A": QUOTES})
    words = words_of(container)
    assert words[:2] == [runtime, "run"]
    assert words_of(container._replace(before=("--root=/a b",)))[:3] == [runtime, "--root=/a b", "run"]
    assert {
        *("--rm", "--interactive", "--network=host", "--ipc=host", "--entrypoint=/bin/sh", "--shm-size=8g"),
        *(f"--env=A={QUOTES}", "--env=CUDA_VISIBLE_DEVICES"),
        *("--volume=/data:/data", "--volume=/a:/b:ro", "--volume=/work:/work"),
    } <= {*words}
    assert words[-3:] == ["img:1", "-c", SCRIPT]


@pytest.mark.parametrize(
    ("runtime", "start", "mount", "own"),
    [
        ("apptainer", ["exec", "--pid", "--pwd=/"], "bind", f"--env=A={QUOTES}"),
        ("enroot", ["start", "--rw"], "mount", "--fakeroot"),
    ],
)
def test_apptainer_and_enroot_command_lines(runtime: Runtime, start: list[str], mount: str, own: str) -> None:
    words = words_of(Container("/img", runtime, ("/data",), ("--fakeroot",), {"A": QUOTES}))
    assert words[: len(start) + 1] == [runtime, *start]
    assert {f"--{mount}=/data:/data", f"--{mount}=/work:/work", "--fakeroot", own} <= {*words}
    assert words[-4:] == ["/img", "/bin/sh", "-c", SCRIPT]


def test_pyxis_becomes_srun_options() -> None:
    mounts, env = ("/data", "/a:/b:ro", "~/c:/c"), {"TOKEN": None, "MODE": "it's fast"}
    container = Container("nvcr.io#nvidia/pytorch:25.10-py3", "pyxis", mounts, env=env)
    step = in_step(SlurmStep("n1", "17"), container, "/work", "/home/me")
    assert step.options == (
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        "--container-mounts=/data:/data,/a:/b:ro,/home/me/c:/c,/work:/work",
        "--no-container-entrypoint",
        "--container-env=TOKEN",
    )
    # What the image sets would win over a variable of srun's own.
    words = step.argv()
    assert words.index("MODE=it's fast") == words.index("/bin/sh") - 1
    plain = in_step(SlurmStep("n1", "17"), Container("~/i.sqsh", "pyxis"), "/", "/home/me").argv()
    assert "--container-image=/home/me/i.sqsh" in plain
    assert not [word for word in plain if word.startswith("--container-env")]


def test_the_workers_directory_is_mounted_unless_the_job_mounts_something_there() -> None:
    mine, root = words_of(Container("i", mounts=("/mine:/work",))), words_of(Container("i"), workdir="/")
    assert [word for word in (*mine, *root) if "volume" in word] == ["--volume=/mine:/work"]


def test_the_store_is_created_and_mounted_for_the_agent_to_put_the_code_there() -> None:
    inside, step = "/s x/runs/job/code", SlurmStep("n1", "17")
    for workdir, mounted in ((inside, ["/s x"]), ("/s x", ["/s x"]), ("/s xy", ["/s x", "/s xy"])):
        line = shlex.split(entry(Container("i"), workdir, "/s x").decode())
        assert [word for word in line if "volume" in word] == [f"--volume={each}:{each}" for each in mounted]
        assert line[line.index("mkdir") : line.index("exec")] == [
            "mkdir",
            "-p",
            "-m",
            "700",
            "/s x",
            "||",
            "exit",
            "73;",
        ]
        options = in_step(step, Container("i", "pyxis"), workdir, "/home/me", "/s x").options
        assert f"--container-mounts={','.join(f'{each}:{each}' for each in mounted)}" in options
    assert "mkdir" not in entry(Container("i", mounts=("/mine:/s x",)), inside, "/s x").decode()


def test_the_home_in_a_container_is_the_nodes_if_a_directory_below_it_is_mounted() -> None:
    for runtime in ("docker", "podman"):
        for directories in (("~/w", ""), ("/w", "~/s"), ("~/s/runs/job", "~/s")):
            line = entry(Container("i", runtime, env={"HOME": "/mine"}), *directories).decode()
            assert line.index('--env=HOME="$HOME" ') < line.index("--env=HOME=/mine ")
        assert "--env=HOME" not in entry(Container("i", runtime), "/w", "/s").decode()


def test_expands_a_home_on_the_node() -> None:
    line = entry(Container("~/img.sif", "apptainer"), "~/work dir").decode()
    assert """--bind="$HOME"'/work dir':"$HOME"'/work dir'""" in line
    assert '"$HOME"/img.sif /bin/sh' in line


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("runtime: docker", "container: image is missing"),
        ("image: i, runtime: lxc", "expected"),
        ("image: i, runtime: [lxc, -v]", "one of docker, podman, apptainer, enroot, pyxis, got 'lxc'"),
        (
            "image: i, runtime: pyxis",
            "pyxis is a plugin for srun: use it in a Slurm job, with launcher: slurm",
        ),
        ("image: i, mounts: ['/a:/b:ro:z']", "expected PATH:PATH_INSIDE:ro at most"),
        ("image: i, volumes: [/a]", "mounts"),
        (r'image: i, env: {A: "b\nc"}', "container.env.A: it can't contain newlines"),
    ],
)
def test_refuses_mistakes_in_the_container_section(section: str, told: str, problems: Problems) -> None:
    assert told in str(problems(f"script: t.py\ncontainer: {{{section}}}"))


def test_printed_plans_name_the_container(load: Load) -> None:
    spec = load("script: t.py\ngpus_per_node: 0\ncontainer: {image: i, runtime: podman}")
    plan = make_plan(spec, {0: Facts("python3", 0)}, None)
    ranks = {NodeRank(0): workers(plan, plan.nodes[0], meeting_of(plan, "job", [1]))}
    for text in (shell_text(plan, ranks), torchrun_text(plan, 1)):
        assert text.startswith("# run this in a container of i (podman)\n")


def test_failures_in_a_container_have_advice() -> None:
    container = Container("i", "podman")
    for kind in (Kind.NO_RUNTIME, Kind.NO_IMAGE, Kind.NO_PYTHON, Kind.OLD_PYTHON, Kind.UNSTARTED):
        assert advice_for(LinkFailure(kind), container, None)
    assert not advice_for(LinkFailure(Kind.UNREACHABLE), container, None)

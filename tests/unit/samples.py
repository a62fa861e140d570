"""Shared parts of several unit tests: job specs from text, and strategies and bounds for properties."""

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from distlaunch.job.build import build_spec
from distlaunch.job.nodes import HostEntry, Surroundings
from distlaunch.job.spec import JobSpec
from distlaunch.job.yaml_document import parse
from distlaunch.schedulers import TABLE, load, sections

Load = Callable[..., JobSpec]
"""The fixture `load`: a job from text (or bytes), `--set`s and `extra` arguments."""
Problems = Callable[..., list[str]]
"""The fixture `problems`: what is wrong with such a job."""
DIRECTORY = "/project"
SECTIONS = sections(load(name).key for name in TABLE)
PEER_GONE = """Traceback (most recent call last):
  File "/t.py", line 9, in <module>
    dist.all_reduce(t)
  File "/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:9
"""
"""The last output of a rank that lost its connection to another one."""
_LOG = "]:[E1126 19:19:56.003190988 ProcessGroupNCCL.cpp:"
_DUMPS = f"""[rank1{_LOG}1914] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a \
collective timeout from  rank 0. This can be caused by other reasons such as network errors.
[rank1{_LOG}1628] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL preparing to dump debug info.
"""
MISSED = f"[rank1{_LOG}1849] Observed flight recorder dump signal from another rank via TCPStore.\n{_DUMPS}\n"
"""The last output, on an H200, of a rank that missed a collective in which another rank timed out."""
_NCCL = "/pytorch/torch/csrc/distributed/c10d/"
WATCHDOG = f"""[rank0{_LOG}689] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) \
ran for 12 s.
[rank0{_LOG}733] Stack trace of the failed collective:
#0 all_reduce from /opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3068
#1 wrapper from /opt/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83
#2 step from /job/train.py:16

[rank0{_LOG}2636] [PG ID 0 PG GUID 0(default_pg) Rank 0] First PG on this rank to signal dumping.
{_DUMPS.replace("ank1", "ank0")}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 12 s.
Exception raised from run at {_NCCL}ProcessGroupNCCL.cpp:2125 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f02e2f7305d in /opt/torch/lib/libc10.so)
frame #1: <unknown function> + 0x129ecc (0x7f02e4329ecc in /lib/x86_64-linux-gnu/libc.so.6)
"""
"""The last output, on an H200, of that other rank, shortened."""
TWO_ON_A_GPU = f"""[rank0]: Traceback (most recent call last):
[rank0]:   File "/job/train.py", line 27, in step
[rank0]:     dist.all_reduce(x)
[rank0]:   File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3068, in \
all_reduce
[rank0]:     work = group.allreduce([tensor], opts)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]: torch.distributed.DistBackendError: NCCL error in: {_NCCL}NCCLUtils.cpp:93, invalid usage (run with \
NCCL_DEBUG=WARN for details), NCCL version 2.28.9
[rank0]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
[rank0]: Last error:
[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60
"""
"""The last output, on an H200, of a rank that used the same GPU as another one."""
_GONE = """NCCL error: remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer """
NCCL_ABORTED = f"""[rank0{_LOG}764] [Rank 0] To avoid data inconsistency, we are taking the entire process \
down.
[rank0{_LOG}2119] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with \
exception: {_GONE}
Exception raised from checkForNCCLErrorsInternal at {_NCCL}ProcessGroupNCCL.cpp:2770 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f02e2f7305d in /opt/torch/lib/libc10.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with \
exception: {_GONE}
Exception raised from checkForNCCLErrorsInternal at {_NCCL}ProcessGroupNCCL.cpp:2770 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f02e2f7305d in /opt/torch/lib/libc10.so)

Exception raised from run at {_NCCL}ProcessGroupNCCL.cpp:2125 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f02e2f7305d in /opt/torch/lib/libc10.so)
"""
"""The end of the output, on an H200, of a rank that waited for one that had exited."""
NCCL_LOST = f"""[rank0{_LOG}612] [Rank 0] Collective WorkNCCL(SeqNum=3, Timeout(ms)=600000) raised the \
following async exception: NCCL error: remote process exited or there was a network error, NCCL version 2.28.9
"""


def bounded(examples: int = 100) -> settings:
    """The same examples in every run, without files of their own."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, report_multiple_bugs=False
    )


def no_room(thread: threading.Thread) -> None:
    """In the place of `threading.Thread.start`, as where memory or the number of processes is limited."""
    raise RuntimeError("can't start new thread")


def spec_of(
    text: str, environ: Mapping[str, str] | None = None, hostfile: tuple[HostEntry, ...] | None = None
) -> JobSpec:
    """Build the job from `text`, as if it were read from DIRECTORY/job.yaml."""
    place = (DIRECTORY, "/home/me", environ or {}, hostfile, None, f"{DIRECTORY}/job.yaml")
    around = Surroundings(*place, sections=SECTIONS)
    return build_spec(parse(text, "job.yaml"), "job.yaml", around)


@contextlib.contextmanager
def longest_file(size: int) -> Iterator[None]:
    """No file can be longer: as on a disk that fills up, a write is cut short, and the next fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_files(directory: object) -> int:
    """How many files below a directory, with a name or without, this process keeps open."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that reads the directory
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sum(link.startswith(f"{directory}/") for link in links)


PAGE = 4096
"""Bytes of the smallest pipe, and the most that are written to one whole or not at all."""


class Pipe:
    """The smallest pipe that the system has."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl(self.write_end, F_SETPIPE_SZ, PAGE)

    def fill(self) -> None:
        """Not a byte more goes into the pipe until `read` has taken these."""
        os.write(self.write_end, bytes(PAGE))

    def read(self, size: int) -> bytes:
        """So many bytes, as soon as they come."""
        data = b""
        while len(data) < size:
            piece = os.read(self.read_end, size - len(data))
            assert piece, "the writer has ended"
            data += piece
        return data

    def read_rest(self, most: int = 1 << 20) -> bytes:
        """What is in the pipe."""
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self.read_end, most)
        return b""

    def leave(self) -> None:
        """The reader is gone."""
        os.close(self.read_end)
        self.read_end = -1

    def close(self) -> None:
        for end in (self.read_end, self.write_end):
            with contextlib.suppress(OSError):
                os.close(end)


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
"""Whatever JSON may have."""

# Everything that a process can be given: any text without NUL. A lone surrogate is no text.
process_text = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
) | st.sampled_from(
    [
        *("", "-", "--", "-rf", "-n", "'", '"', "\\", "\n", "a\nb\n", "$(id)", "`id`", "${HOME}"),
        *("$$", "!!", "*", "~", "{a,b}", "a;b", "&&", "#x", "=", "\t ", "'\"'\"'", "\r", "é€😀"),
        "\x01\x7f\x9b",
    ]
)


def _some(**kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with some of these keys."""
    return st.fixed_dictionaries({}, optional=kinds)


_word = st.text("abz09-_./", min_size=1, max_size=8)
_number = st.integers(-1, 9)
_auto = st.just("auto")
_duration = st.sampled_from(["30s", "10m", "1.5h", "200ms", "2 d", 5, 0, 0.5, "soon", -1, ""])
_env = st.dictionaries(st.sampled_from(["A", "B_1", "RANK", "9X"]), _word | _number | st.none(), max_size=3)
_node = _some(host=_word, gpus=_number | _auto, procs=_number, address=_word, port=_number, env=_env)

job_documents: st.SearchStrategy[dict[str, Any]] = _some(
    name=_word,
    nodes=_number | st.lists(_word | _node, max_size=3),
    gpus_per_node=_number | _auto,
    procs_per_node=_number,
    numa_binding=st.sampled_from(["node", "core-complex", "none"]),
    cpu_binding=st.sampled_from(["cores", ["0-3", 4], ["0,2", "1-3,5"], [], ["x"], ["3-1"], "0-3"]),
    backend=st.sampled_from(["auto", "nccl", "gloo", "smoke"]),
    rendezvous=_some(endpoint=_word, id=_word, backend=st.just("static")),
    master_addr=_word,
    master_port=st.integers(-1, 70000),
    script=_word,
    module=st.sampled_from(["a", "a.b", "-a"]),
    command=st.lists(_word, max_size=2),
    args=st.lists(_word | _number, max_size=3),
    env=_env,
    python=_word,
    workdir=_word,
    timeouts=_some(connect=_duration, join=_duration, stop=_duration, job=_duration),
    logs=_some(dir=_word, console=st.sampled_from(["all", "rank0", "none", [0, 1], [-1], "some"])),
    ssh=_some(config=_word, options=st.lists(st.sampled_from(["A=b", "A b", "=b"])), persist=_duration),
    launcher=st.sampled_from(["auto", "local", "ssh", "slrm"]),
    typo=_word,
)
"""Job files as data, about as often wrong as right."""


def found_at(spec: JobSpec, path: str) -> Any:
    """What a spec has at a path of the job file; of nodes, how many."""
    value: Any = spec
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value[step]
        else:
            value = value[int(step)] if step.isdigit() else getattr(value, step)
    return len(value) if path == "nodes" else value

"""The verdict of a check: findings, differences between nodes, passed checks, and skipped checks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

from distlaunch.agent.frozen import Frozen
from distlaunch.contract import chosen_by_nccl, interface_variables
from distlaunch.job.spec import Checked
from distlaunch.job.text import is_loopback
from distlaunch.wording import counted, listed, size_words

Level = Literal["error", "warning"]
PROBED = get_args(Checked)
PARTS = ("reach", *PROBED, "code")
"""Parts of a check, in the order of its output. `PROBED` are the ones a job may skip."""
MIB, GIB = 1 << 20, 1 << 30
MAX_NUMBER = 1e18
LOW_DISK, LOW_FILES, LOW_SHM, LOW_NOFILE = GIB, 1000, GIB, 1024
"""Limits below which a node is worth a warning: free bytes and files of a disk, bytes of /dev/shm,
and open files."""
MAX_CLOCK_S = 5.0
USED_GPU = 0.1
"""Share of a GPU's memory above which its use by other programs is worth a warning."""
SYNC = ", or set sync: true"
"""The end of some advice, which doesn't apply to a job that can't use `sync`."""


class NodeReport(Frozen):
    """The result for one node: why it can't be reached, or the seconds to reach it, and its facts.

    `facts` is the output of the probe, keyed by part. Each value contains facts or, as text, the reason why
    they are missing. `clock_s` is the difference between the node's clock and the clock of this machine.
    `python_error` is the reason why the job's interpreter, `python`, can't start.
    """

    label: str
    failure: str = ""
    advice: str = ""
    took_s: float = 0.0
    facts: Mapping[str, Any] = {}
    clock_s: float | None = None
    python: str = ""
    python_error: str = ""

    def part(self, name: str) -> Mapping[str, Any]:
        """Return the facts of one part; empty if they are missing."""
        found = self.facts.get(name)
        return found if isinstance(found, dict) else {}


class Expected(Frozen):
    """The facts that a job expects: the GPUs and workers of each node, by name, in the order of ranks.

    `master_addr` is not used if the job runs on one machine. `master_key` is the key that sets it.
    `joins` is true if the ranks certainly connect to it.
    `uneven` contains the facts, by name, that the job file sets for each node. `can_sync` is true if the job
    can set `sync`.
    """

    backend: str
    master_addr: str
    master_key: str
    joins: bool
    one_machine: bool
    gpus: Mapping[str, int | None]
    procs: Mapping[str, int]
    uneven: frozenset[str]
    can_sync: bool


class Finding(Frozen):
    """A problem with a part (see `PARTS`): what is wrong, why it matters, and what to do.

    `nodes` contains the nodes that have the problem. It is empty if the problem concerns the job as a whole.
    """

    level: Level
    part: str
    what: str
    why: str = ""
    do: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return the finding as one line: what · why it matters · what to do."""
        where = f"{listed(self.nodes)}: " if self.nodes else ""
        return f"{self.part}: {where}{' · '.join(filter(None, (self.what, self.why, self.do)))}"


_error, _warning = partial(Finding, "error"), partial(Finding, "warning")


class Report(Frozen):
    """The verdict. `differs` maps facts that differ to the value on each node.

    `fine` describes the checks that passed, and `unchecked` those that were skipped. `slow` has a row for
    each slow link: its nodes, its bandwidth and the median. `links` contains all measurements. `ranks`
    contains the GPU of each rank, with its NUMA node and the InfiniBand cards on that NUMA node.
    """

    findings: tuple[Finding, ...]
    differs: Mapping[str, Mapping[str, str]]
    fine: tuple[str, ...]
    unchecked: tuple[str, ...]
    slow: tuple[tuple[str, str, str], ...] = ()
    links: Mapping[str, Any] = {}
    ranks: Mapping[int, Any] = {}

    @property
    def ok(self) -> bool:
        """Return whether the job can work."""
        return not any(finding.level == "error" for finding in self.findings)

    def joined(self, links: "Report") -> "Report":
        """Return this report with the results of the link test."""
        return links._replace(
            findings=tuple(sorted((*self.findings, *links.findings), key=lambda each: each.level)),
            differs=self.differs,
            ranks=self.ranks,
            fine=(*self.fine, *links.fine),
            unchecked=(*self.unchecked, *links.unchecked),
        )

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "ok": self.ok,
            "findings": [each._asdict() for each in self.findings],
            "differs": {name: dict(values) for name, values in self.differs.items()},
            "fine": list(self.fine),
            "unchecked": list(self.unchecked),
            "ranks": dict(self.ranks),
            **({"links": dict(self.links)} if self.links else {}),
        }


def report(
    job: Expected | None,
    nodes: Sequence[NodeReport],
    further: Iterable[Finding],
    fine: Iterable[str] = (),
    skipped: Iterable[str] = (),
    skip: Sequence[str] = (),
) -> Report:
    """Return the verdict on a job, without the parts to `skip`.

    `distlaunch check` calls this with the facts from its probe, and `run` with the facts that agents
    report before the ranks start. `further` findings, `fine` and `skipped` have other sources.
    """
    of_nodes = (each._replace(nodes=(node.label,)) for node in nodes for each in _problems(node, job))
    grouped: dict[Finding, tuple[str, ...]] = {}
    for each in (*further, *of_nodes):
        problem = each._replace(nodes=())
        grouped[problem] = (*grouped.get(problem, ()), *each.nodes)
    found = [problem._replace(nodes=labels) for problem, labels in grouped.items()]
    differs = _differences(nodes)
    found += _disagreements(nodes, differs, job)
    found = [each for each in found if each.part not in skip]
    if job and not job.can_sync:
        found = [each._replace(do=each.do.removesuffix(SYNC)) for each in found]
    found.sort(key=lambda each: (each.level != "error", PARTS.index(each.part)))
    unchecked = {part: words for part, words in _unchecked(nodes) if part not in skip}
    bad = {each.part for each in found} | {*unchecked, *skip}
    gpus = {node.label: _gpus(node) for node in nodes}
    return Report(
        tuple(found),
        differs,
        tuple(f"{part} ({words})" for part, words in _summaries(nodes) if part not in bad) + tuple(fine),
        (*(words for each in unchecked.values() for words in each), *skipped),
        ranks=dict(_ranks(job, gpus)) if job else {},
    )


def _ranks(job: Expected, gpus: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[int, Any]]:
    """Yield each rank and its GPU, for the nodes that have a GPU for every rank."""
    first = 0
    for label, procs in job.procs.items():
        for local_rank, gpu in enumerate(gpus[label][:procs] if len(gpus[label]) >= procs else ()):
            known = {key: gpu.get(key) for key in ("uuid", "numa", "nics")}
            if known["numa"] in ("-1", ""):  # the kernel doesn't know
                known |= {"numa": None, "nics": None}
            yield first + local_rank, {"node": label, **known}
        first += procs


def _problems(node: NodeReport, job: Expected | None) -> Iterator[Finding]:
    """Yield the problems of one node, by part.

    Any fact may be missing or have the wrong type, because the facts come from the node.
    """
    if node.failure:
        yield _error("reach", node.failure, "its ranks can't start", node.advice)
        return
    if node.python_error:
        yield _error("software", node.python_error, "no rank can start", "set python")
    if node.clock_s is not None and abs(node.clock_s) > MAX_CLOCK_S:
        way = "ahead of" if node.clock_s > 0 else "behind"
        what = f"the clock is {_span(abs(node.clock_s))} {way} this machine's"
        yield _warning("load", what, "timestamps in logs and files will be wrong", "synchronize both (NTP)")
    yield from _place(node.part("place"))
    yield from _limits(node.part("limits"), node.part("network"))
    yield from _software(node.part("software"), node, job)
    yield from _devices(node, job)
    yield from _network(node.part("network"), node, job)
    yield from _load(node.part("load"))
    if odd := _items((code := node.part("code")).get("odd")):
        files = counted(_number(code.get("files")), "file")
        what = f"{len(odd)} of {files} differ from those on this machine: {listed(odd, 3)}"
        do = f"copy them to the node{SYNC}"
        yield _warning("code", what, "ranks may run different programs", do)


# The problems that the facts of one part show, if there are any facts


def _place(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts and not facts.get("exists"):
        what = f"the workdir {facts.get('workdir')} does not exist or can't be accessed"
        yield _error("place", what, "no rank can start", f"set workdir or copy it to the node{SYNC}")
    elif facts.get("unreadable"):
        what = f"can't read the script {facts.get('script')}: {facts['unreadable']}"
        do = f"correct its path or permissions, or copy it{SYNC}"
        yield _error("place", what, "no rank can start", do)
    if facts.get("unrecorded"):
        yield _error("place", str(facts["unrecorded"]), "no rank can start")
    yield from _disks(facts)


def _disks(facts: Mapping[str, Any]) -> Iterator[Finding]:
    shown: set[str] = set()
    for name, disk in _rows(facts.get("disks")):
        path, free, files = str(disk.get("path")), _number(disk.get("free")), _number(disk.get("files"))
        if name == "shm":
            if (size := _number(disk.get("size"))) < LOW_SHM:
                what = f"{path} has only {size_words(size)}"
                do = "enlarge it (docker run --shm-size=8g), or set num_workers=0"
                yield _warning("place", what, "data loaders and NCCL share memory through it", do)
            continue
        if path in shown:
            continue
        shown.add(path)
        if not disk.get("writable") and name == "workdir" and facts.get("sync"):
            what, do = f"can't write to {path}", "make it writable, or set sync.to to another directory"
            yield _error("place", what, "the code can't be copied there", do)
        elif not disk.get("writable"):
            what, why = f"can't write to {path}", "temporary files and caches can't be created"
            do = "make it writable, or set env.TMPDIR to another directory"
            if name == "workdir":
                why = "checkpoints can't be saved there"
                do = "make it writable, or save them elsewhere"
            yield _warning("place", what, why, do)
        else:
            if disk.get("free") is not None and free < LOW_DISK:
                what = f"the disk with {path} has only {size_words(free)} free"
                yield _warning("place", what, "writing to it may fail", "free up some space")
            if disk.get("files") is not None and files < LOW_FILES:
                what = f"the disk with {path} has room for only {counted(files, 'file')} (inodes)"
                yield _warning("place", what, "creating files may fail", "delete some files there")


def _limits(facts: Mapping[str, Any], network: Mapping[str, Any]) -> Iterator[Finding]:
    nofile, memlock = _number(facts.get("nofile"), -1), _number(facts.get("memlock"), -1)
    if 0 <= nofile < LOW_NOFILE:
        what, why = f"only {nofile} open files are allowed", "data loaders and NCCL need hundreds"
        do = "raise the limit (ulimit -n, limits.conf, or docker run --ulimit nofile=65536)"
        yield _warning("limits", what, why, do)
    if reason := facts.get("no_stacks"):
        do = "pip install py-spy" if "installed" in str(reason) else "set it to 1 or less (sysctl)"
        yield _warning("limits", str(reason), "the code at which ranks hang will be unknown", do)
    if network.get("ib") and 0 <= memlock < 32 * GIB:
        what = f"only {size_words(memlock)} of memory may be locked"
        do = "remove the limit (limits.conf; docker run --ulimit memlock=-1 or --cap-add IPC_LOCK; Slurm "
        do += "passes on that of the submitting shell, unless it has PropagateResourceLimitsExcept=MEMLOCK)"
        yield _warning("limits", what, "InfiniBand locks its buffers", do)


def _software(facts: Mapping[str, Any], node: NodeReport, job: Expected | None) -> Iterator[Finding]:
    if syntax := facts.get("syntax"):
        what, do = f"{node.python} can't parse the script: {syntax}", "correct it, or set another python"
        yield _error("software", what, "no rank can run it", do)
    missing = _items(facts.get("missing"))
    if missing:
        what = f"{node.python} lacks {listed(missing)}"
        why = "the script imports " + ("it" if len(missing) == 1 else "them")
        yield _error("software", what, why, "install what is missing, or set python")
    if job and job.backend == "nccl" and facts.get("torch") and not facts.get("has_nccl"):
        what = f"torch {facts['torch']} is built without CUDA, so it has no nccl"
        do = "install a build with CUDA or ROCm, or set backend: gloo"
        yield _error("software", what, "backend: nccl can't work", do)
    built, driver = str(facts.get("cuda") or ""), _number(node.part("devices").get("cuda")) // 1000
    if driver and built.partition(".")[0].isdecimal() and int(built.partition(".")[0]) > driver:
        what = f"torch is built for CUDA {built}, but the driver supports CUDA {driver} at most"
        do = f"update the driver, or install torch for CUDA {driver}"
        found = _error("software", what, "no GPU can be used", do)
        yield found if job and job.backend == "nccl" else found._replace(level="warning")
    paths = dict(_texts(facts.get("nccl")))
    if len({*paths.values()}) > 1:
        places = [f"{version} in {path}" for path, version in paths.items()]
        what = f"several NCCL libraries: {listed(places)}"
        do = "unless LD_LIBRARY_PATH is meant to replace torch's own (nvidia/nccl/lib), as with a cloud's "
        do += "network plug-in, remove the others from it"
        yield _warning("software", what, "torch may load the wrong one", do)


_SLOWDOWNS = {0x20: "temperature", 0x40: "temperature", 0x80: "power supply", 0x8: "hardware"}
"""Bits of nvmlClocksThrottleReason (nvml.h) that indicate a problem, not idleness or a power limit."""


_PROGRAMS_XIDS = (13, 31, 43, 45)
"""Xid errors that a bug in a program usually causes (docs.nvidia.com/deploy/xid-errors)."""


def _devices(node: NodeReport, job: Expected | None) -> Iterator[Finding]:
    facts = node.part("devices")
    gpus = _gpus(node)
    wanted = (job.gpus.get(node.label) or 0) if job and facts else 0
    used_gpus = max(wanted, job.procs.get(node.label, 0)) if job else len(gpus)
    if facts.get("broken") and (wanted or gpus):
        what = f"the NVIDIA driver can't be used: {facts['broken']}"
        do = "run nvidia-smi there; after an update of the driver, reboot the node"
        yield _warning("devices", what, "ranks can't use its GPUs", do)
    elif wanted and not facts.get("counted"):
        what = f"the job needs {counted(wanted, 'GPU')}, but no NVIDIA or AMD GPU is visible on the node"
        do = "check the driver, CUDA_VISIBLE_DEVICES, and the GPUs of the allocation or container"
        none = "if the node has none, leave it out, or lower gpus_per_node (or its own gpus)"
        yield _warning("devices", what, do=f"{do}; {none}")
    elif len(gpus) < wanted:
        what = f"{counted(len(gpus), 'GPU')} instead of {wanted}"
        yield _error(
            "devices", what, "some ranks have none", "lower gpus_per_node, or see CUDA_VISIBLE_DEVICES"
        )
    for at, gpu in enumerate(gpus[:used_gpus]):
        yield from _gpu(_number(gpu.get("index"), at), gpu)
    logged = ((number, pci) for pci, number in _pairs(facts.get("xids")) if number not in _PROGRAMS_XIDS)
    if xids := Counter(f"Xid {number} ({pci})" for number, pci in logged):
        what = f"since the node started, its kernel has logged {listed(list(xids))}"
        do = "look up the Xid at docs.nvidia.com/deploy/xid-errors; ignore it if it has been handled since"
        yield _warning("devices", what, "a GPU or its link had an error", do)


def _gpu(number: int, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    total, used = _number(gpu.get("memory")), _number(gpu.get("used"))
    if total and used > total * USED_GPU:
        users = listed([f"{name} (pid {pid})" for pid, name in _pairs(gpu.get("users"))])
        by = f", by {users}" if users else ""
        what = f"GPU {number} already has {size_words(used)} of {size_words(total)} in use{by}"
        do = "stop the program (see nvidia-smi), or use other GPUs: set env.CUDA_VISIBLE_DEVICES, and "
        do += "gpus_per_node to their number"
        yield _warning("devices", what, "a rank that uses it may run out of memory", do)
    if _number(gpu.get("ecc")):
        what = f"GPU {number} has had {counted(_number(gpu.get('ecc')), 'uncorrectable memory error')}"
        yield _warning("devices", what, "ranks that use this memory are killed", "reset or replace it")
    bits = _number(gpu.get("slowdowns"))
    if slow := [name for bit, name in _SLOWDOWNS.items() if bits & bit]:
        what = f"GPU {number} is throttled ({slow[0]})"
        yield _warning("devices", what, "every rank waits for it", "check cooling and power")
    if _number(gpu.get("mig")):
        what = f"GPU {number} is divided (MIG)"
        why = "a rank can use only one slice, and NCCL can't connect two slices of a GPU"
        do = f"unless the slices are intended, turn MIG off (nvidia-smi -i {number} -mig 0)"
        yield _warning("devices", what, why, do)


def _network(facts: Mapping[str, Any], node: NodeReport, job: Expected | None) -> Iterator[Finding]:
    if not facts or not job or job.one_machine:
        return
    name, own = str(facts.get("name")), _items(facts.get("own"))
    if own and all(map(is_loopback, own)):
        what = f"its own name, {name}, resolves to {own[0]}"
        why = "programs that announce it can't be reached from other nodes"
        yield _warning("network", what, why, "map it to the node's address in /etc/hosts")
    if node.label != next(iter(job.gpus)):
        master, do = _items(facts.get("master")), f"set {job.master_key} to an IP address of the first node"
        level: Level = "error" if job.joins else "warning"  # others may ignore MASTER_ADDR
        if not master:
            what = f"can't resolve MASTER_ADDR {job.master_addr}"
            yield _error("network", what, "ranks can't join", do)._replace(level=level)
        elif any(map(is_loopback, master)):
            what = f"MASTER_ADDR {job.master_addr} resolves to {next(filter(is_loopback, master))}"
            correct = f"correct /etc/hosts there, or {do}"
            yield _error("network", what, "ranks can't join", correct)._replace(level=level)
    yield from _interfaces(facts, job.backend)


def _interfaces(facts: Mapping[str, Any], backend: str) -> Iterator[Finding]:
    interfaces = [name for name, _ in _rows(facts.get("interfaces"))]
    for variable, value in _texts(facts.get("named")):
        names = value.split(",") if variable == "GLOO_SOCKET_IFNAME" else chosen_by_nccl(value, interfaces)
        if variable in interface_variables(backend) and not (names and {*names} <= {*interfaces}):
            missing = [name for name in names if name not in interfaces]
            what = f"{variable}={value} matches none of the interfaces ({listed(interfaces)})"
            if missing:
                what = f"{variable}={value}: there is no interface {missing[0]} ({listed(interfaces)})"
            do = "correct or remove the variable (in env, or on the node)"
            yield _error("network", what, "ranks can't connect", do)
    for port, state in _texts(facts.get("ib")):
        if "ACTIVE" not in state and backend == "nccl":
            what = f"InfiniBand port {port} is {state or 'in an unknown state'}"
            do = "unless it is unused, check its cable and switch, and the subnet manager"
            yield _warning("network", what, "NCCL can't use it", do)


def _load(facts: Mapping[str, Any]) -> Iterator[Finding]:
    cpus, load = _number(facts.get("all_cpus")), facts.get("load")
    if cpus and isinstance(load, float) and load > 1.5 * cpus + 1:
        what = f"a load of {load:.0f} on {counted(cpus, 'CPU')}"
        do = "check `top` there; stop other programs, or leave out the node"
        yield _warning("load", what, "every rank waits for the slowest", do)
    total, available = _number(facts.get("memory")), _number(facts.get("available"))
    if total and available < total // 20:
        what = f"only {size_words(available)} of {size_words(total)} of memory is available"
        do = "check `top` and `df -h -t tmpfs` there; stop other programs, remove files in /dev/shm, or "
        do += "leave out the node"
        yield _warning("load", what, "ranks may be killed", do)
    for run, ranks in sorted(_rows(facts.get("jobs"))):
        one = next((each for _, each in _rows(ranks)), {})
        such = f", such as {one.get('command')} (pid {one.get('pid')})" if one else ""
        of = "another launcher (RANK and WORLD_SIZE are set)" if run == "another launcher" else run
        what = f"found {counted(len(ranks), 'rank')} of {of} already running{such}"
        why = "this job would share CPUs, GPUs and memory with it"
        yield _warning("load", what, why, "if they train, wait until they end, or stop them")


# Several nodes


_COMPARED = (
    ("software", "python", "Python"),
    ("software", "torch", "torch"),
    ("software", "cuda", "CUDA"),
    ("software", "hip", "HIP"),
    ("software", "driver", "driver"),
    ("place", "digest", "script"),
    ("load", "cpus", "CPUs"),
    ("limits", "nofile", "open files"),
    ("limits", "cpus", "CPU limit"),
    ("limits", "memory", "memory limit"),
)
"""Facts that should be the same on all nodes: the part, the key, and the name used in messages, of each."""
_WEIGHTY: Mapping[str, tuple[str, str]] = {
    "script": ("nodes would run different programs", f"copy it to all nodes{SYNC}"),
    "torch": ("ranks may fail or disagree", "install the same version everywhere"),
    "CUDA": ("ranks may fail or disagree", "install the same torch build everywhere"),
    "NCCL": ("ranks may fail to connect", "install the same version everywhere"),
    "GPUs": ("the job may have fewer or slower ranks", "unless intended, repair or leave out the node"),
}
"""For each fact, by name, whose differences cause a warning: why they matter, and what to do."""
_TITLES = {
    "script": ("place", "the script"),
    "CUDA": ("software", "the CUDA version of torch"),
    "GPUs": ("devices", "the number or model of GPUs"),
}
"""The part and subject of a warning in `_WEIGHTY`. The defaults are `software` and the name of the fact."""


def _values(nodes: Sequence[NodeReport]) -> dict[str, dict[str, str]]:
    """Return the values to compare, as text, keyed by name, then by node."""
    values: dict[str, dict[str, str]] = defaultdict(dict)
    for node in nodes:
        for part, key, name in _COMPARED:
            if (facts := node.part(part)) and key in facts:
                value = "none" if facts[key] is None else str(facts[key])
                values[name][node.label] = value[: 12 if key == "digest" else None]
        software, network = node.part("software"), node.part("network")
        if paths := dict(_texts(software.get("nccl"))):
            values["NCCL"][node.label] = listed(sorted({*paths.values()}))
        if node.part("devices"):
            gpus = Counter(str(gpu.get("name")) for gpu in _gpus(node))
            values["GPUs"][node.label] = listed([f"{n} x {name}" for name, n in gpus.items()]) or "none"
        used = dict(_rows(network.get("interfaces"))).get(str(network.get("used")))
        if used and not is_loopback(str(used.get("address"))):  # the first node may reach itself by it
            values["interface"][node.label] = str(network["used"])
            values["MTU"][node.label] = str(used.get("mtu"))
    return values


def _differences(nodes: Sequence[NodeReport]) -> dict[str, dict[str, str]]:
    """Return the values of `_values` that aren't the same on all nodes."""
    return {name: values for name, values in _values(nodes).items() if len({*values.values()}) > 1}


def _disagreements(
    nodes: Sequence[NodeReport], differs: Mapping[str, Mapping[str, str]], job: Expected | None
) -> Iterator[Finding]:
    """Yield findings about values that should match on all nodes. The most common value counts as usual."""
    planned = job.uneven if job else frozenset[str]()
    for name, values in differs.items():
        counts = Counter(values.values())
        usual = counts.most_common(1)[0][0]
        odd = tuple(node for node, value in values.items() if value != usual) if len(nodes) > 2 else ()
        if name in _WEIGHTY.keys() - planned:
            part, title = _TITLES.get(name, ("software", name))
            what = f"{title} differs"
            one_odd = odd and len(counts) == 2 and name != "script"
            what += f": {values[odd[0]]} instead of {usual}" if one_odd else ""
            yield _warning(part, what, *_WEIGHTY[name], odd or tuple(values))
        elif name == "MTU":
            what = f"the nodes have different MTUs toward the first node ({listed(sorted(counts))})"
            do = "use the same MTU on all nodes"
            yield _warning("network", what, "large packets may be lost", do, odd)
    addresses: dict[str, dict[str, str]] = {}  # the nodes and their network stacks
    for node in nodes:
        network = node.part("network")
        for name, interface in _rows(network.get("interfaces")):
            if name == network.get("used") and interface.get("address"):
                stacks = addresses.setdefault(str(interface["address"]), {})
                stacks[node.label] = str(network.get("stack") or node.label)
    for address, stacks in addresses.items():
        if len({*stacks.values()}) > 1 and not is_loopback(address):
            what = f"have the same address, {address}"
            do = "if they are containers or VMs behind NAT, give them the host's network; otherwise, change "
            do += "the address of all but one"
            yield _error("network", what, "packets may reach the wrong node", do, tuple(stacks))


def _summaries(nodes: Sequence[NodeReport]) -> Iterator[tuple[str, str]]:
    """Yield each part with a short summary, for the line of passed checks."""
    reached = [node for node in nodes if not node.failure]
    if not reached:
        return
    slowest = max(node.took_s for node in reached)
    yield "reach", f"{counted(len(reached), 'node')}, {slowest:.1f} s"
    yield "place", "workdir, script, disks"
    yield "limits", "ulimits, cgroups"
    first = reached[0].part("software")
    torch = f"torch {first['torch']}" if first.get("torch") else "no torch"
    yield "software", f"Python {first.get('python')}, {torch}"
    gpus = sum(len(_gpus(node)) for node in reached)
    yield "devices", counted(gpus, "GPU") if gpus else "no GPUs"
    yield "load", "clock, memory"
    if code := reached[0].part("code"):
        yield "code", counted(_number(code.get("files")), "file")


def _unchecked(nodes: Sequence[NodeReport]) -> Iterator[tuple[str, list[str]]]:
    """Yield each part that some nodes have no facts about, with the reasons."""
    for part in (*PROBED, *(["code"] if any("code" in node.facts for node in nodes) else [])):
        whys: dict[str, list[str]] = {}
        for node in nodes:
            if not node.failure and not isinstance(node.facts.get(part), dict):
                whys.setdefault(str(node.facts.get(part, "no answer")), []).append(node.label)
        if whys:
            yield part, [f"{part} of {listed(labels)}: {why}" for why, labels in whys.items()]
    if labels := [node.label for node in nodes if node.part("place").get("unreadable")]:
        yield "imports", [f"imports of the script: {listed(labels)} can't read it"]


# Values from nodes, whose types are not certain


def _number(value: Any, default: int = 0) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < MAX_NUMBER else default


def _items(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _gpus(node: NodeReport) -> list[Mapping[str, Any]]:
    gpus = node.part("devices").get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _rows(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, dict):
        yield from ((str(name), row) for name, row in value.items() if isinstance(row, dict))


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        yield from ((str(name), str(text)) for name, text in value.items())


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list):
        yield from ((pair[0], pair[1]) for pair in value if isinstance(pair, list) and len(pair) == 2)


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"

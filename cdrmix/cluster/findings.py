"""Judgement of what `cdrmix doctor` was told by the hosts: one finding a check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cdrmix.planning.cluster import GIB

Status = Literal["ok", "warn", "FAIL"]

# The first is needed for a single checkpoint, the second for a run.
_LEAST_DISK_BYTES = 1 * GIB
_GOOD_DISK_BYTES = 20 * GIB
_LEAST_INODES, _GOOD_INODES = 1_000, 100_000
# NCCL makes a segment of 9,637,888 bytes for each rank of a host before it does anything else;
# ranks on CPUs need none.
_SHARED_MEMORY_BYTES_PER_DEVICE = 10_000_000
_GOOD_SHARED_MEMORY_BYTES = 1 * GIB
# A rank has its shards mapped, with a file each, and sockets to the others.
_LEAST_OPEN_FILES, _GOOD_OPEN_FILES = 1024, 4096
_OPEN_FILES_TO_ASK = 65536
# Threads of torch, gloo and NCCL, the watchdog and the launcher.
_LEAST_TASKS_PER_RANK, _GOOD_TASKS_PER_RANK = 50, 200
# A difference only confuses the order of log lines of different hosts: a warning, no failure.
_LARGEST_CLOCK_DIFFERENCE_SECONDS = 2.0
# Lines of good hosts that a finding gives.
_NUM_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """Result of one check; `remedy` tells what to run or change where it is not ok."""

    check: str
    status: Status
    detail: str
    remedy: str | None = None


# Of an answer; one of another version of CDRmix may lack some.
KEYS = frozenset(
    (
        *("cdrmix", "python", "packages", "devices", "unusable", "is_for_cpus", "cores", "time"),
        *("interface", "address", "unknown_interfaces", "disk_free_bytes", "limits", "temporary"),
        *("shared_memory_free_bytes", "compiler", "has_python_header", "processes", "files"),
    )
)
# JSON objects of the hosts' probes, by the hosts' names, each with the time of the call (`began`)
# and its duration (`seconds`).
Answers = Mapping[str, dict[str, Any]]
# Status, detail and remedy for one host.
_Judgement = tuple[Status, str, str | None]


def judge(answers: Answers, ranks: Mapping[str, int], *, over_ssh: bool) -> list[Finding]:
    """Judges the answers of all hosts that were reached.

    Args:
        ranks: number of ranks on each host.
        over_ssh: whether ranks are started by ssh, whose limits are not those of this shell.
    """
    findings = [
        _same("cdrmix", answers, "copy one checkout to all hosts: rsync -a --delete DIR/ HOST:DIR"),
        _same("python", answers, "use the same Python on all hosts, such as one shared .venv"),
        _packages(answers),
        _devices(answers, ranks, over_ssh=over_ssh),
        _clocks(answers),
        _interface(answers),
        _each("disk", answers, _disk),
        _each("/dev/shm", answers, lambda told: _shared_memory(told, ranks[told["name"]])),
        _each("temporary", answers, _temporary),
        _each("open files", answers, lambda told: _open_files(told, over_ssh=over_ssh)),
        _each("processes", answers, lambda told: _tasks(told, ranks[told["name"]])),
    ]
    if any(told["limits"]["infiniband"] for told in answers.values()):
        findings.append(_each("locked memory", answers, _locked_memory))
    return [*findings, _each("compiler", answers, _compiler), _leftovers(answers)]


def listed(texts: Mapping[str, object], separator: str = "; ") -> str:
    """Lists texts by host, for the detail of a finding."""
    return separator.join(f"{name}: {text}" for name, text in texts.items())


def _each(check: str, answers: Answers, judged: Callable[[dict[str, Any]], _Judgement]) -> Finding:
    """Judges every host by itself; the finding tells of the hosts that are worst off."""
    results = {name: judged({**told, "name": name}) for name, told in answers.items()}
    order = ("ok", "warn", "FAIL")
    status = max((status for status, _, _ in results.values()), key=order.index)
    hosts_of: dict[str, list[str]] = {}
    remedies: dict[str, None] = {}
    for name, (of_host, detail, remedy) in results.items():
        if of_host == status:
            hosts_of.setdefault(detail, []).append(name)
            remedies |= {remedy: None} if remedy else {}
    lines = [f"{', '.join(names)}: {text}" for text, names in hosts_of.items()]
    if len(answers) == 1:
        lines = [*hosts_of]
    elif status == "ok" and len(lines) > _NUM_SHOWN:  # the good hosts are of little interest
        lines = [*lines[:_NUM_SHOWN], "..."]
    return Finding(check, status, "; ".join(lines), "; ".join(remedies) or None)


def _same(check: str, answers: Answers, remedy: str) -> Finding:
    """Compares a value of all hosts with that of the first: [what must be equal, what is told]."""
    first, *others = answers
    equal, text = answers[first][check]
    different = {
        name: answers[name][check][1] for name in others if answers[name][check][0] != equal
    }
    if different:
        return Finding(check, "FAIL", f"{first}: {text}; {listed(different)}", remedy)
    return Finding(check, "ok", text)


def _packages(answers: Answers) -> Finding:
    """Compares the versions of packages; tells of those that differ or are missing."""
    first, *others = answers
    versions = answers[first]["packages"]
    problems = []
    for package, version in versions.items():
        by_host = {name: told["packages"][package] or "missing" for name, told in answers.items()}
        if version is None or len({*by_host.values()}) > 1:
            shown = listed(by_host, ", ") if others else by_host[first]
            problems.append(f"{package} ({shown})")
    if problems:
        remedy = "run make setup in the checkout of each host, or share one .venv"
        return Finding("packages", "FAIL", "; ".join(problems), remedy)
    text = ", ".join(f"{package} {version}" for package, version in versions.items())
    return Finding("packages", "ok", text)


def _devices(answers: Answers, ranks: Mapping[str, int], *, over_ssh: bool) -> Finding:
    """Compares the devices of each host with its slots, if a hostfile gives slots."""
    kinds = {}
    lacks = {}
    for name, told in answers.items():
        devices = told["devices"]
        kind = "; ".join(f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices))
        kinds[name] = kind or f"no GPU, {told['cores']} cores"
        if over_ssh and 0 < len(devices) < ranks[name] and not told["is_for_cpus"]:
            lacks[name] = f"{len(devices)} devices for {ranks[name]} ranks"
    unusable = {name: told["unusable"] for name, told in answers.items() if told["unusable"]}
    if unusable:
        versions = "import torch; print(torch.version.cuda, torch.version.hip)"
        remedy = f'python -c "{versions}" and nvidia-smi or rocm-smi tell more'
        return Finding("devices", "FAIL", listed(unusable), remedy)
    if lacks:
        remedy = "give as many slots in the hostfile (or --nproc) as there are devices"
        return Finding("devices", "FAIL", listed(lacks), remedy)
    kind, *others = {*kinds.values()}
    if others:
        remedy = "leave the slower hosts out of the hostfile if that costs more than they bring"
        return Finding("devices", "warn", f"the slowest sets the pace: {listed(kinds)}", remedy)
    is_meant = all(told["is_for_cpus"] or told["devices"] for told in answers.values())
    if is_meant:
        return Finding("devices", "ok", kind)
    remedy = "for GPUs install their driver; DS_ACCELERATOR=cpu says that CPUs are meant"
    return Finding("devices", "warn", kind, remedy)


def _clocks(answers: Answers) -> Finding:
    """Compares each host's clock with this machine's; the call's duration is the uncertainty."""
    differences = []
    for name, told in answers.items():
        after = told["time"] - told["began"]
        differences.append((max(0.0, -after, after - told["seconds"]), name))
    worst, name = max(differences)
    if worst > _LARGEST_CLOCK_DIFFERENCE_SECONDS:
        remedy = "start a time service on all hosts: systemctl enable --now chrony"
        detail = f"{name} is {worst:.1f} s off: the times in logs will mislead"
        return Finding("clock", "warn", detail, remedy)
    return Finding("clock", "ok", f"within {worst:.1f} s of this machine's")


def _interface(answers: Answers) -> Finding:
    """Checks the way to the first host, and the interfaces that variables name."""
    unknown = {n: ", ".join(t["unknown_interfaces"]) for n, t in answers.items()}
    if wrong := {name: text for name, text in unknown.items() if text}:
        detail = f"no such interface: {listed(wrong)}"
        remedy = "unset the variable, so that it is chosen; `ip -brief address` lists the names"
        return Finding("interface", "FAIL", detail, remedy)
    if len(answers) == 1:
        return Finding("interface", "ok", "loopback")
    interfaces = {name: told["interface"] for name, told in answers.items()}
    if cut_off := ", ".join(name for name, via in interfaces.items() if via is None):
        detail = f"no way to the first host from {cut_off}"
        remedy = "look at `ip route` and /etc/hosts there: the first host's name must lead to it"
        return Finding("interface", "FAIL", detail, remedy)
    return Finding("interface", "ok", f"to the first host {listed(interfaces, ', ')}")


def _disk(told: dict[str, Any]) -> _Judgement:
    free, inodes = told["disk_free_bytes"], told["limits"]["free_inodes"]
    if free is None:
        return "FAIL", "the folder of runs is not there", "mount it there, or give another --folder"
    detail = f"{free / GIB:.1f} GiB free"
    if inodes is not None and inodes < _GOOD_INODES:
        detail += f", {inodes:,} inodes"
    if free < _LEAST_DISK_BYTES or (inodes is not None and inodes < _LEAST_INODES):
        return "FAIL", detail, "delete files that are not needed, or give another --folder"
    if free < _GOOD_DISK_BYTES or (inodes is not None and inodes < _GOOD_INODES):
        return "warn", detail, "free 20 GiB and 100,000 inodes for checkpoints, or lower keep"
    return "ok", detail, None


def _shared_memory(told: dict[str, Any], ranks: int) -> _Judgement:
    free = told["shared_memory_free_bytes"]
    remedy = "mount -o remount,size=8G /dev/shm as root; of a container: docker run --shm-size=8g"
    if free is None:
        return "FAIL", "is not there", "mount -t tmpfs tmpfs /dev/shm as root"
    needed = _SHARED_MEMORY_BYTES_PER_DEVICE * ranks
    detail = f"{free / GIB:.2f} GiB free"
    if told["devices"] and not told["is_for_cpus"] and free < needed:
        return "FAIL", f"{detail}, and {ranks} ranks take {needed / GIB:.2f}", remedy
    if free < _GOOD_SHARED_MEMORY_BYTES:
        return "warn", f"{detail}: little for NCCL's buffers", remedy
    return "ok", detail, None


def _temporary(told: dict[str, Any]) -> _Judgement:
    folder, error = told["temporary"]["folder"], told["temporary"]["error"]
    if error:
        return "FAIL", f"{folder}: {error}", "export TMPDIR=DIR, a folder that you can write to"
    return "ok", f"{folder} can be written", None


def _open_files(told: dict[str, Any], *, over_ssh: bool) -> _Judgement:
    files, most = told["limits"]["open_files"], told["limits"]["most_open_files"]
    if files is None or files >= _GOOD_OPEN_FILES:
        return "ok", "no limit" if files is None else f"at most {files:,}", None
    most = _OPEN_FILES_TO_ASK if most is None else min(most, _OPEN_FILES_TO_ASK)
    remedy = f"ulimit -n {most} in this shell"
    if over_ssh or most < _GOOD_OPEN_FILES:
        remedy = (
            f"as root there, a line `* - nofile {_OPEN_FILES_TO_ASK}` in "
            "/etc/security/limits.d/cdrmix.conf; of a container: docker run --ulimit "
            f"nofile={_OPEN_FILES_TO_ASK}"
        )
    status: Status = "FAIL" if files < _LEAST_OPEN_FILES else "warn"
    needs = f"a rank with many shards needs {_GOOD_OPEN_FILES:,}"
    return status, f"at most {files:,}; {needs}", remedy


def _tasks(told: dict[str, Any], ranks: int) -> _Judgement:
    left = told["limits"]["tasks_left"]
    if left is None:
        return "ok", "no limit", None
    detail = f"{max(0, left):,} more processes and threads may start"
    if left >= _GOOD_TASKS_PER_RANK * ranks:
        return "ok", detail, None
    status: Status = "FAIL" if left < _LEAST_TASKS_PER_RANK * ranks else "warn"
    needed = f"{ranks} ranks may take {_GOOD_TASKS_PER_RANK * ranks:,}"
    remedy = "ulimit -u unlimited; of a container: docker run --pids-limit -1"
    return status, f"{detail}; {needed}", remedy


def _locked_memory(told: dict[str, Any]) -> _Judgement:
    most, devices = told["limits"]["locked_bytes"], ", ".join(told["limits"]["infiniband"])
    if not devices or most is None:
        return "ok", "no limit" if most is None else "no InfiniBand device", None
    remedy = (
        "as root there, a line `* - memlock unlimited` in /etc/security/limits.d/cdrmix.conf; of "
        "a container: docker run --ulimit memlock=-1"
    )
    return "warn", f"at most {most / 2**20:,.1f} MiB, and {devices} needs more", remedy


def _compiler(told: dict[str, Any]) -> _Judgement:
    if told["compiler"] is None:
        detail = "no C++ compiler: kernels that are built at first use run in slower forms"
        return "warn", detail, "apt-get install g++"
    if told["devices"] and not told["is_for_cpus"] and not told["has_python_header"]:
        detail = "no Python.h, which Triton's kernels are built with"
        return "warn", detail, "apt-get install python3-dev"
    return "ok", told["compiler"], None


def _leftovers(answers: Answers) -> Finding:
    leftovers = "; ".join(
        f"{name}: {what}"
        for name, told in answers.items()
        for what in (*told["processes"], *told["files"])
    )
    if not leftovers:
        return Finding("leftovers", "ok", "none of this user's")
    remedy = "cdrmix doctor --remove-leftovers ends and deletes them"
    return Finding("leftovers", "warn", leftovers, remedy)

"""`cdrmix doctor`: checks that this machine, or the hosts of a hostfile, are ready for a run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from cdrmix.cluster.hosts import Host, address_for_others, is_this_machine, run_on, ssh_command
from cdrmix.cluster.starter import LauncherStart, LaunchPlace
from cdrmix.config.load import shipped
from cdrmix.errors import TrainingError
from cdrmix.planning.cluster import GIB

Status = Literal["ok", "warn", "FAIL"]

_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    "from cdrmix.cluster.probe import main; main(sys.argv[1:])"
)
_PROBE = (sys.executable, "-c", _PROGRAM)
# The first is needed for a single checkpoint, the second for a run.
_LEAST_DISK_BYTES = 1 * GIB
_GOOD_DISK_BYTES = 20 * GIB
_GOOD_SHARED_MEMORY_BYTES = 1 * GIB
# A difference only confuses the order of log lines of different hosts: a warning, no failure.
_LARGEST_CLOCK_DIFFERENCE_SECONDS = 2.0
# Large enough for the bandwidth to outweigh the latency of the links.
_ALL_REDUCE_BYTES = 100_000_000
_ALL_REDUCE_SECONDS = 180.0


@dataclass(frozen=True)
class Finding:
    """Result of one check: a line of the table."""

    check: str
    status: Status
    detail: str


@dataclass(frozen=True)
class _Answer:
    """JSON object of a host's probe, with the time of the call and its duration (seconds)."""

    host: Host
    values: dict[str, Any]
    began: float
    seconds: float


def examine(
    hosts: Sequence[Host], *, folder: Path, ranks_per_host: int | None, with_all_reduce: bool
) -> list[Finding]:
    """Runs all checks, the cheap ones first, on the hosts or else on this machine.

    Args:
        hosts: of a hostfile, or none.
        folder: of the runs, which all hosts must see.
        ranks_per_host: ranks of the all-reduce on each host; default as the launcher decides.
    """
    targets = list(hosts) or [Host("localhost", ranks_per_host or 1)]
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        address = address_for_others(targets[0].name, [host.name for host in targets[1:]])
    except OSError as error:
        return [Finding("shared folder", "FAIL", f"{folder}: cannot be made: {error.strerror}")]
    except TrainingError as error:
        return [Finding("hosts", "FAIL", str(error))]
    with ThreadPoolExecutor(max_workers=32) as pool:
        results = list(pool.map(lambda host: _ask(host, "look", str(folder), address), targets))
    answers = [answer for answer in results if "failed" not in answer.values]
    failures = [f"{a.host.name}: {a.values['failed']}" for a in results if "failed" in a.values]
    slowest = max((answer.seconds for answer in answers), default=0.0)
    detail = "; ".join(failures) or f"{len(answers)} reached, the slowest in {slowest:.1f} s"
    findings = [Finding("hosts", "FAIL" if failures else "ok", detail)]
    if answers:
        alive = [answer.host for answer in answers]
        findings += [
            _same("python", answers),
            _same("packages", answers),
            _devices(answers, has_slots=bool(hosts)),
            _clocks(answers),
            _interfaces(answers),
            _space(answers, "disk_free_bytes", "disk", _LEAST_DISK_BYTES),
            _space(answers, "shared_memory_free_bytes", "/dev/shm", 0),
            _shared_folder(alive, folder),
            _ports(alive, address),
            _leftovers(answers),
        ]
    # last, because it takes minutes to time out where one of the others fails
    if with_all_reduce and is_ready(findings):
        findings.append(_all_reduce(hosts, folder, ranks_per_host))
    return findings


def as_table(findings: Sequence[Finding]) -> str:
    """Formats the findings in columns."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(f"{f.status:4}  {f.check:{width}}  {f.detail}" for f in findings)


def is_ready(findings: Sequence[Finding]) -> bool:
    """True if no check failed."""
    return all(finding.status != "FAIL" for finding in findings)


def remove_leftovers_on_hosts(hosts: Sequence[Host]) -> list[str]:
    """Removes leftovers of this user's earlier runs on the hosts; returns a line for each."""
    lines = []
    for host in hosts or [Host("localhost", 1)]:
        values = _ask(host, "remove_leftovers").values
        lines += [f"{host.name}: {what}" for what in values.get("removed", [])]
    return lines


def _ask(host: Host, *words: str) -> _Answer:
    # the wall clock to compare with the host's, the monotonic one to measure
    began = time.time()
    clock = time.monotonic()
    done = run_on(host.name, [*_PROBE, *words])
    seconds = time.monotonic() - clock
    try:
        values = json.loads(done.stdout)
    except ValueError:
        output = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        values = {"failed": output[-1]}
    return _Answer(host, values, began, seconds)


def _same(check: str, answers: Sequence[_Answer]) -> Finding:
    """Compares a value of all hosts with that of the first."""
    texts = []
    for answer in answers:
        value = answer.values[check]
        if isinstance(value, dict):
            value = ", ".join(f"{name} {version or 'missing'}" for name, version in value.items())
        texts.append(value)
    names = [answer.host.name for answer in answers]
    others = [f"{n} has {t}" for n, t in zip(names, texts, strict=True) if t != texts[0]]
    if others:
        return Finding(check, "FAIL", f"{names[0]} has {texts[0]}; {'; '.join(others)}")
    return Finding(check, "FAIL" if "missing" in texts[0] else "ok", texts[0])


def _devices(answers: Sequence[_Answer], *, has_slots: bool) -> Finding:
    """Compares the devices of each host with its slots, if a hostfile gives slots."""
    kinds = {}
    for answer in answers:
        names = answer.values["devices"]
        kind = "; ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
        kinds[answer.host.name] = kind or f"no GPU, {answer.values['cores']} cores"
    problems = [f"{a.host.name}: {a.values['unusable']}" for a in answers if a.values["unusable"]]
    problems = problems or [
        f"{a.host.name} has {len(a.values['devices'])} devices for {a.host.slots} slots"
        for a in answers
        if has_slots and 0 < len(a.values["devices"]) < a.host.slots
    ]
    if problems:
        return Finding("devices", "FAIL", "; ".join(problems))
    if len({*kinds.values()}) > 1:
        text = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
        return Finding("devices", "warn", f"the slowest sets the pace: {text}")
    kind = next(iter(kinds.values()))
    return Finding("devices", "warn" if kind.startswith("no GPU") else "ok", kind)


def _clocks(answers: Sequence[_Answer]) -> Finding:
    """Compares each host's clock with this machine's; the call's duration is the uncertainty."""
    differences = []
    for answer in answers:
        after = answer.values["time"] - answer.began
        differences.append((max(-after, after - answer.seconds, 0.0), answer.host.name))
    worst, name = max(differences)
    if worst > _LARGEST_CLOCK_DIFFERENCE_SECONDS:
        detail = f"{name} is {worst:.1f} s off: logs will mislead. Try an NTP service"
        return Finding("clock", "warn", detail)
    return Finding("clock", "ok", f"within {worst:.1f} s of this machine's")


def _interfaces(answers: Sequence[_Answer]) -> Finding:
    if len(answers) == 1:
        return Finding("interface", "ok", "loopback")
    names = {answer.host.name: answer.values["interface"] for answer in answers}
    cut_off = [name for name, interface in names.items() if interface is None]
    if cut_off:
        return Finding("interface", "FAIL", f"no way to the first host from {', '.join(cut_off)}")
    text = ", ".join(f"{name}: {interface}" for name, interface in names.items())
    return Finding("interface", "ok", f"to the first host {text}")


def _space(answers: Sequence[_Answer], key: str, check: str, least: int) -> Finding:
    sizes = [(a.values[key], a.host.name) for a in answers]
    free, name = min((-1 if size is None else size, name) for size, name in sizes)
    if free < 0:
        return Finding(check, "FAIL", f"{name}: is not there")
    good = _GOOD_DISK_BYTES if least else _GOOD_SHARED_MEMORY_BYTES
    status: Status = "FAIL" if free < least else "warn" if free < good else "ok"
    return Finding(check, status, f"least free: {free / GIB:.1f} GiB on {name}")


def _shared_folder(hosts: Sequence[Host], folder: Path) -> Finding:
    """Checks that all hosts read a file that the first writes, syncs and renames."""
    file = folder / f".doctor-{uuid4().hex[:8]}"
    text = uuid4().hex
    try:
        for attempt in (text, text[::-1]):  # a second time over the first, as `latest` is written
            answer = _ask(hosts[0], "write", str(file), attempt).values
            if "failed" in answer:
                return Finding("shared folder", "FAIL", f"{hosts[0].name}: {answer['failed']}")
            for host in hosts[1:]:
                # through a process of its own, as a rank on that host would read it
                if _ask(host, "read", str(file)).values.get("text") != attempt:
                    why = f"{host.name} does not see in {folder} what {hosts[0].name} writes"
                    return Finding("shared folder", "FAIL", why)
    finally:
        file.unlink(missing_ok=True)
    others = f", seen by {len(hosts) - 1} others" if len(hosts) > 1 else ""
    return Finding("shared folder", "ok", f"{folder}: written, synced, renamed{others}")


def _ports(hosts: Sequence[Host], address: str) -> Finding:
    """Checks that the other hosts can connect to the first on a port that nobody chose."""
    if len(hosts) == 1:
        return Finding("ports", "ok", "only this machine")
    first = hosts[0].name
    words = [*_PROBE, "listen"]  # ends after a minute, also where killing ssh does not reach it
    command = words if is_this_machine(first) else ssh_command(first, words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None, "asked for above"
            port = json.loads(listener.stdout.readline() or "{}").get("port", 0)
            calls = [
                (host, _ask(host, "call_address", address, str(port)).values) for host in hosts[1:]
            ]
        finally:
            listener.terminate()
    failures = [
        f"{host.name}: {values.get('failed') or values['error']}"
        for host, values in calls
        if values.get("error", True)
    ]
    if failures:
        why = f"{address}:{port} cannot be called. Is there a firewall? {'; '.join(failures)}"
        return Finding("ports", "FAIL", why)
    return Finding("ports", "ok", f"{len(calls)} others reach {address} on any port")


def _leftovers(answers: Sequence[_Answer]) -> Finding:
    found = [
        f"{answer.host.name}: {what}"
        for answer in answers
        for what in (*answer.values["processes"], *answer.values["files"])
    ]
    if not found:
        return Finding("leftovers", "ok", "none of this user's")
    detail = f"{'; '.join(found)}. --remove-leftovers ends and deletes them"
    return Finding("leftovers", "warn", detail)


def _all_reduce(hosts: Sequence[Host], folder: Path, ranks_per_host: int | None) -> Finding:
    """Sums a hundred megabytes over all ranks, started as a run is."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as name:
        out = Path(name) / "result.json"
        words = ["--bytes", str(_ALL_REDUCE_BYTES), "--out", str(out)]
        place = LaunchPlace(tuple(hosts), ranks_per_host)
        script = shipped("launch") / "all_reduce.py"
        try:
            with LauncherStart(
                place, words, folder=Path(name), variables={}, script=script
            ) as start:
                start.wait_for_launcher(_ALL_REDUCE_SECONDS)
            result = json.loads(out.read_text(encoding="utf-8"))
        except TrainingError as error:
            return Finding("all-reduce", "FAIL", str(error))
        except FileNotFoundError:
            why = f"no result within {_ALL_REDUCE_SECONDS:.0f} s; see the messages above"
            return Finding("all-reduce", "FAIL", why)
    work = f"{result['bytes'] / 1e6:.0f} MB over {result['ranks']} ranks"
    speed = f"{result['bus_bytes_per_second'] / 1e9:.2f} GB/s a link"
    return Finding("all-reduce", "ok", f"{work} in {result['seconds']:.3f} s: {speed}")

"""`cdrmix doctor`: checks that this machine, or the hosts of a hostfile, are ready for a run."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from cdrmix.cluster.handover import LauncherStart
from cdrmix.cluster.hosts import Host, address_for_others, is_this_machine, run_on, ssh_command
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


# JSON objects of the hosts' probes, by the hosts' names, each with the time of the call (`began`)
# and its duration (`seconds`).
_Answers = Mapping[str, dict[str, Any]]


def examine(
    hosts: Sequence[Host], *, folder: Path, ranks_per_host: int | None, with_all_reduce: bool
) -> list[Finding]:
    """Runs all checks, the cheap ones first, on the hosts or else on this machine.

    Args:
        hosts: of a hostfile, or none.
        folder: of the runs, which all hosts must see.
        ranks_per_host: ranks of the all-reduce on each host; default as the launcher decides.
    """
    targets = [host.name for host in hosts] or ["localhost"]
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        address = address_for_others(targets[0], targets[1:])
    except OSError as error:
        return [Finding("shared folder", "FAIL", f"{folder}: cannot be made: {error.strerror}")]
    except TrainingError as error:
        return [Finding("hosts", "FAIL", str(error))]
    with ThreadPoolExecutor(max_workers=32) as pool:
        results = pool.map(lambda name: _ask(name, "look", str(folder), address), targets)
        told = dict(zip(targets, results, strict=True))
    failures = {name: values["failed"] for name, values in told.items() if "failed" in values}
    answers = {name: values for name, values in told.items() if name not in failures}
    slowest = max((values["seconds"] for values in answers.values()), default=0.0)
    detail = _listed(failures) or f"{len(answers)} reached, the slowest in {slowest:.1f} s"
    findings = [Finding("hosts", "FAIL" if failures else "ok", detail)]
    if answers:
        interfaces = {name: values["interface"] for name, values in answers.items()}
        interface = Finding("interface", "ok", f"to the first host {_listed(interfaces, ', ')}")
        if len(answers) == 1:
            interface = Finding("interface", "ok", "loopback")
        elif cut_off := ", ".join(name for name, via in interfaces.items() if via is None):
            interface = Finding("interface", "FAIL", f"no way to the first host from {cut_off}")
        findings += [
            _same("python", answers),
            _same("packages", answers),
            _devices(answers, slots={host.name: host.slots for host in hosts}),
            _clocks(answers),
            interface,
            _space(answers, "disk_free_bytes", "disk", _LEAST_DISK_BYTES),
            _space(answers, "shared_memory_free_bytes", "/dev/shm", 0),
            _shared_folder([*answers], folder),
            _ports([*answers], address),
        ]
        leftovers = "; ".join(
            f"{name}: {what}"
            for name, values in answers.items()
            for what in (*values["processes"], *values["files"])
        )
        advice = ". --remove-leftovers ends and deletes them" if leftovers else ""
        detail = (leftovers or "none of this user's") + advice
        findings.append(Finding("leftovers", "warn" if leftovers else "ok", detail))
    # last, because it takes minutes to time out where one of the others fails
    if with_all_reduce and all(finding.status != "FAIL" for finding in findings):
        findings.append(_all_reduce(hosts, folder, ranks_per_host))
    return findings


def remove_leftovers_on_hosts(hosts: Sequence[Host]) -> list[str]:
    """Removes leftovers of this user's earlier runs on the hosts; returns a line for each."""
    lines = []
    for name in [host.name for host in hosts] or ["localhost"]:
        removed = _ask(name, "remove_leftovers").get("removed", [])
        lines += [f"{name}: {what}" for what in removed]
    return lines


def _ask(name: str, *words: str) -> dict[str, Any]:
    # the wall clock to compare with the host's, the monotonic one to measure
    began = time.time()
    clock = time.monotonic()
    done = run_on(name, [*_PROBE, *words])
    seconds = time.monotonic() - clock
    try:
        values = json.loads(done.stdout)
    except ValueError:
        output = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        values = {"failed": output[-1]}
    return {**values, "began": began, "seconds": seconds}


def _listed(texts: Mapping[str, object], separator: str = "; ") -> str:
    """Lists texts by host, for the detail of a finding."""
    return separator.join(f"{name}: {text}" for name, text in texts.items())


def _same(check: str, answers: _Answers) -> Finding:
    """Compares a value of all hosts with that of the first."""
    texts = {}
    for name, values in answers.items():
        texts[name] = values[check]
        if isinstance(values[check], dict):
            versions = values[check].items()
            texts[name] = ", ".join(f"{what} {version or 'missing'}" for what, version in versions)
    first, text = next(iter(texts.items()))
    others = "; ".join(f"{name} has {other}" for name, other in texts.items() if other != text)
    if others:
        return Finding(check, "FAIL", f"{first} has {text}; {others}")
    return Finding(check, "FAIL" if "missing" in text else "ok", text)


def _devices(answers: _Answers, *, slots: Mapping[str, int]) -> Finding:
    """Compares the devices of each host with its slots, if a hostfile gives slots."""
    kinds = {}
    lacks = []
    for name, values in answers.items():
        devices = values["devices"]
        kind = "; ".join(f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices))
        kinds[name] = kind or f"no GPU, {values['cores']} cores"
        if 0 < len(devices) < slots.get(name, 0):
            lacks.append(f"{name} has {len(devices)} devices for {slots[name]} slots")
    unusable = {name: v["unusable"] for name, v in answers.items() if v["unusable"]}
    problems = _listed(unusable) or "; ".join(lacks)
    if problems:
        return Finding("devices", "FAIL", problems)
    kind, *others = {*kinds.values()}
    if others:
        return Finding("devices", "warn", f"the slowest sets the pace: {_listed(kinds)}")
    return Finding("devices", "warn" if kind.startswith("no GPU") else "ok", kind)


def _clocks(answers: _Answers) -> Finding:
    """Compares each host's clock with this machine's; the call's duration is the uncertainty."""
    differences = []
    for name, values in answers.items():
        after = values["time"] - values["began"]
        differences.append((max(0.0, -after, after - values["seconds"]), name))
    worst, name = max(differences)
    if worst > _LARGEST_CLOCK_DIFFERENCE_SECONDS:
        detail = f"{name} is {worst:.1f} s off: logs will mislead. Try an NTP service"
        return Finding("clock", "warn", detail)
    return Finding("clock", "ok", f"within {worst:.1f} s of this machine's")


def _space(answers: _Answers, key: str, check: str, least: int) -> Finding:
    sizes = [(values[key], name) for name, values in answers.items()]
    free, name = min((-1 if size is None else size, name) for size, name in sizes)
    if free < 0:
        return Finding(check, "FAIL", f"{name}: is not there")
    good = _GOOD_DISK_BYTES if least else _GOOD_SHARED_MEMORY_BYTES
    status: Status = "FAIL" if free < least else "warn" if free < good else "ok"
    return Finding(check, status, f"least free: {free / GIB:.1f} GiB on {name}")


def _shared_folder(names: Sequence[str], folder: Path) -> Finding:
    """Checks that all hosts read a file that the first writes, syncs and renames."""
    file = folder / f".doctor-{uuid4().hex[:8]}"
    text = uuid4().hex
    first, *others = names
    try:
        for attempt in (text, text[::-1]):  # a second time over the first, as `latest` is written
            answer = _ask(first, "write", str(file), attempt)
            if "failed" in answer:
                return Finding("shared folder", "FAIL", f"{first}: {answer['failed']}")
            for name in others:
                # through a process of its own, as a rank on that host would read it
                if _ask(name, "read", str(file)).get("text") != attempt:
                    why = f"{name} does not see in {folder} what {first} writes"
                    return Finding("shared folder", "FAIL", why)
    finally:
        file.unlink(missing_ok=True)
    seen = f", seen by {len(others)} others" if others else ""
    return Finding("shared folder", "ok", f"{folder}: written, synced, renamed{seen}")


def _ports(names: Sequence[str], address: str) -> Finding:
    """Checks that the other hosts can connect to the first on a port that nobody chose."""
    first, *others = names
    if not others:
        return Finding("ports", "ok", "only this machine")
    words = [*_PROBE, "listen"]  # ends after a minute, also where killing ssh does not reach it
    command = words if is_this_machine(first) else ssh_command(first, words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None, "asked for above"
            port = json.loads(listener.stdout.readline() or "{}").get("port", 0)
            calls = {name: _ask(name, "call_address", address, str(port)) for name in others}
        finally:
            listener.terminate()
    errors = {name: values.get("failed") or values["error"] for name, values in calls.items()}
    failures = _listed({name: error for name, error in errors.items() if error})
    if failures:
        why = f"{address}:{port} cannot be called. Is there a firewall? {failures}"
        return Finding("ports", "FAIL", why)
    return Finding("ports", "ok", f"{len(calls)} others reach {address} on any port")


def _all_reduce(hosts: Sequence[Host], folder: Path, ranks_per_host: int | None) -> Finding:
    """Sums a hundred megabytes over all ranks, started as a run is."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as name:
        out = Path(name) / "result.json"
        words = ["--bytes", str(_ALL_REDUCE_BYTES), "--out", str(out)]
        try:
            with LauncherStart(
                hosts,
                words,
                ranks_per_host=ranks_per_host,
                folder=Path(name),
                variables={},
                script=shipped("launch") / "all_reduce.py",
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

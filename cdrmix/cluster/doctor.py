"""`cdrmix doctor`: is this machine, or are the hosts of a hostfile, ready for a run?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
    "import sys; sys.path.insert(0, {root!r}); "
    "from cdrmix.cluster.probe import main; main(sys.argv[1:])"
)
# Less is no room for a single checkpoint; less than the second is little for a run.
_LEAST_DISK_BYTES = 1 * GIB
_GOOD_DISK_BYTES = 20 * GIB
_GOOD_SHARED_MEMORY_BYTES = 1 * GIB
_LARGEST_CLOCK_DIFFERENCE_SECONDS = 2.0
_ALL_REDUCE_BYTES = 100_000_000
_ALL_REDUCE_SECONDS = 180.0


@dataclass(frozen=True)
class Finding:
    """One line of the table: what was looked at, how it is, and what was seen."""

    check: str
    status: Status
    detail: str


@dataclass(frozen=True)
class _Answer:
    """What a host told, when it was asked (seconds since the epoch) and how long that took."""

    host: Host
    told: dict[str, Any]
    asked: float
    seconds: float


def examine(
    hosts: Sequence[Host], *, folder: Path, ranks_per_host: int | None, with_all_reduce: bool
) -> list[Finding]:
    """All checks, the cheap ones first; no hosts: this machine.

    Args:
        hosts: of a hostfile, or none.
        folder: where runs are written, which all hosts must see.
        ranks_per_host: ranks of the all-reduce on each host; default as the launcher finds.
        with_all_reduce: whether to start ranks for the last check.
    """
    asked = list(hosts) or [Host("localhost", ranks_per_host or 1)]
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        address = address_for_others(asked[0].name, [host.name for host in asked[1:]])
    except OSError as error:
        return [Finding("shared folder", "FAIL", f"{folder}: cannot be made: {error.strerror}")]
    except TrainingError as error:
        return [Finding("hosts", "FAIL", str(error))]
    answers, found = _ask_all(asked, str(folder), address)
    if answers:
        checks: list[Callable[[], Finding]] = [
            lambda: _same("python", answers, lambda told: told["python"]),
            lambda: _same("packages", answers, lambda told: _listed(told["packages"])),
            lambda: _devices(answers, wanted=bool(hosts)),
            lambda: _clocks(answers),
            lambda: _interfaces(answers),
            lambda: _space(answers, "disk_free_bytes", "disk", _LEAST_DISK_BYTES),
            lambda: _space(answers, "shared_memory_free_bytes", "/dev/shm", 0),
            lambda: _shared_folder([answer.host for answer in answers], folder),
            lambda: _ports([answer.host for answer in answers], address),
            lambda: _leftovers(answers),
        ]
        found += [check() for check in checks]
    if with_all_reduce and not any(each.status == "FAIL" for each in found):
        found.append(_all_reduce(hosts, folder, ranks_per_host))
    return found


def as_table(findings: Sequence[Finding]) -> str:
    """The findings in columns."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(f"{f.status:4}  {f.check:{width}}  {f.detail}" for f in findings)


def report_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON list."""
    return json.dumps([asdict(finding) for finding in findings])


def is_ready(findings: Sequence[Finding]) -> bool:
    """Whether nothing would keep a run from working."""
    return all(finding.status != "FAIL" for finding in findings)


def remove_leftovers_on_hosts(hosts: Sequence[Host]) -> list[str]:
    """End what earlier runs of this user left on the hosts; what was removed, by host."""
    removed = []
    for host in hosts or [Host("localhost", 1)]:
        told = _ask(host, "remove_leftovers").told
        removed += [f"{host.name}: {what}" for what in told.get("removed", [])]
    return removed


def _probe(*words: str) -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-c", _PROGRAM.format(root=root), *words]


def _ask(host: Host, *words: str) -> _Answer:
    began = time.time()
    clock = time.monotonic()
    done = run_on(host.name, _probe(*words))
    seconds = time.monotonic() - clock
    try:
        told = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        told = {"failed": said[-1]}
    return _Answer(host, told, began, seconds)


def _ask_all(
    hosts: Sequence[Host], folder: str, address: str
) -> tuple[list[_Answer], list[Finding]]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: _ask(host, "look", folder, address), hosts))
    failed = [f"{a.host.name}: {a.told['failed']}" for a in answers if "failed" in a.told]
    heard = [answer for answer in answers if "failed" not in answer.told]
    slowest = max((answer.seconds for answer in heard), default=0.0)
    detail = "; ".join(failed) or f"{len(heard)} reached, the slowest in {slowest:.1f} s"
    return heard, [Finding("hosts", "FAIL" if failed else "ok", detail)]


def _same(
    check: str, answers: Sequence[_Answer], value: Callable[[dict[str, Any]], str]
) -> Finding:
    """Whether all hosts tell the same; else who differs from the first, and how."""
    first = value(answers[0].told)
    others = [f"{a.host.name} has {value(a.told)}" for a in answers if value(a.told) != first]
    if others:
        return Finding(check, "FAIL", f"{answers[0].host.name} has {first}; {'; '.join(others)}")
    return Finding(check, "FAIL" if "missing" in first else "ok", first)


def _listed(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())


def _devices(answers: Sequence[_Answer], *, wanted: bool) -> Finding:
    """Devices of each host against its slots, where a hostfile gives slots."""
    described = {}
    for answer in answers:
        names = answer.told["devices"]
        kinds = "; ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
        described[answer.host.name] = kinds or f"no GPU, {answer.told['cores']} cores"
    idle = [f"{a.host.name}: {a.told['unusable']}" for a in answers if a.told["unusable"]]
    if idle:
        return Finding("devices", "FAIL", "; ".join(idle))
    short = [
        f"{a.host.name} has {len(a.told['devices'])} devices for {a.host.slots} slots"
        for a in answers
        if wanted and 0 < len(a.told["devices"]) < a.host.slots
    ]
    if short:
        return Finding("devices", "FAIL", "; ".join(short))
    if len({*described.values()}) > 1:
        listed = "; ".join(f"{name}: {kinds}" for name, kinds in described.items())
        return Finding("devices", "warn", f"the slowest sets the pace: {listed}")
    kinds = next(iter(described.values()))
    return Finding("devices", "warn" if kinds.startswith("no GPU") else "ok", kinds)


def _clocks(answers: Sequence[_Answer]) -> Finding:
    """Each host's clock against ours; an answer's own duration is the uncertainty."""
    worst = 0.0
    name = ""
    for answer in answers:
        early = answer.asked
        late = answer.asked + answer.seconds
        difference = max(early - answer.told["time"], answer.told["time"] - late, 0.0)
        if difference >= worst:
            worst = difference
            name = answer.host.name
    bad = worst > _LARGEST_CLOCK_DIFFERENCE_SECONDS
    detail = f"within {worst:.1f} s of this machine's"
    if bad:
        detail = f"{name} is {worst:.1f} s off: logs will mislead. Try an NTP service"
    return Finding("clock", "warn" if bad else "ok", detail)


def _interfaces(answers: Sequence[_Answer]) -> Finding:
    if len(answers) == 1:
        return Finding("interface", "ok", "loopback")
    names = {answer.host.name: answer.told["interface"] for answer in answers}
    none = [name for name, interface in names.items() if interface is None]
    if none:
        return Finding("interface", "FAIL", f"no way to the first host from {', '.join(none)}")
    listed = ", ".join(f"{name}: {interface}" for name, interface in names.items())
    return Finding("interface", "ok", f"to the first host {listed}")


def _space(answers: Sequence[_Answer], key: str, check: str, least: int) -> Finding:
    free, name = min((a.told[key] if a.told[key] is not None else -1, a.host.name) for a in answers)
    if free < 0:
        return Finding(check, "FAIL", f"{name}: is not there")
    good = _GOOD_DISK_BYTES if least else _GOOD_SHARED_MEMORY_BYTES
    status: Status = "FAIL" if free < least else "warn" if free < good else "ok"
    return Finding(check, status, f"least free: {free / GIB:.1f} GiB on {name}")


def _shared_folder(hosts: Sequence[Host], folder: Path) -> Finding:
    """What one host writes, syncs and renames, all others must read."""
    file = folder / f".doctor-{uuid4().hex[:8]}"
    text = uuid4().hex
    try:
        for attempt in (text, text[::-1]):  # a second time over the first, as `latest` is written
            written = _ask(hosts[0], "write", str(file), attempt).told
            if "failed" in written:
                return Finding("shared folder", "FAIL", f"{hosts[0].name}: {written['failed']}")
            for host in hosts[1:]:
                if _ask(host, "read", str(file)).told.get("text") != attempt:
                    why = f"{host.name} does not see in {folder} what {hosts[0].name} writes"
                    return Finding("shared folder", "FAIL", why)
    finally:
        file.unlink(missing_ok=True)
    seen = f", seen by {len(hosts) - 1} others" if len(hosts) > 1 else ""
    return Finding("shared folder", "ok", f"{folder}: written, synced, renamed{seen}")


def _ports(hosts: Sequence[Host], address: str) -> Finding:
    """Whether the others can call the first host on a port that nobody chose."""
    if len(hosts) == 1:
        return Finding("ports", "ok", "only this machine")
    first = hosts[0].name
    words = _probe("listen")
    command = words if is_this_machine(first) else ssh_command(first, words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None, "asked for above"
            port = json.loads(listener.stdout.readline() or "{}").get("port", 0)
            calls = [(h, _ask(h, "call", address, str(port)).told) for h in hosts[1:]]
        finally:
            listener.terminate()
    failed = [
        f"{h.name}: {t.get('failed') or t['error']}" for h, t in calls if t.get("error", True)
    ]
    if failed:
        why = f"{address}:{port} cannot be called. Is there a firewall? {'; '.join(failed)}"
        return Finding("ports", "FAIL", why)
    return Finding("ports", "ok", f"{len(calls)} others reach {address} on any port")


def _leftovers(answers: Sequence[_Answer]) -> Finding:
    listed = [
        f"{answer.host.name}: {what}"
        for answer in answers
        for what in (*answer.told["processes"], *answer.told["files"])
    ]
    if not listed:
        return Finding("leftovers", "ok", "none of this user's")
    advice = "--remove-leftovers ends and deletes them"
    return Finding("leftovers", "warn", f"{'; '.join(listed)}. {advice}")


def _all_reduce(hosts: Sequence[Host], folder: Path, ranks_per_host: int | None) -> Finding:
    """A hundred megabytes over all ranks, started as a run is."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        out = Path(place) / "result.json"
        words = ["--bytes", str(_ALL_REDUCE_BYTES), "--out", str(out)]
        where = LaunchPlace(tuple(hosts), ranks_per_host)
        script = shipped("launch") / "all_reduce.py"
        try:
            with LauncherStart(
                where, words, folder=Path(place), variables={}, script=script
            ) as start:
                start.wait_for_launcher(_ALL_REDUCE_SECONDS)
            result = json.loads(out.read_text(encoding="utf-8"))
        except TrainingError as error:
            return Finding("all-reduce", "FAIL", str(error))
        except FileNotFoundError:
            why = f"no result within {_ALL_REDUCE_SECONDS:.0f} s; see the messages above"
            return Finding("all-reduce", "FAIL", why)
    speed = result["bus_bytes_per_second"] / 1e9
    size = result["bytes"] / 1e6
    seconds = result["seconds"]
    detail = (
        f"{size:.0f} MB over {result['ranks']} ranks in {seconds:.3f} s: {speed:.2f} GB/s a link"
    )
    return Finding("all-reduce", "ok", detail)

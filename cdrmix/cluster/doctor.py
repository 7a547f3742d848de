"""`cdrmix doctor`: checks that this machine, or the hosts of a hostfile, are ready for a run."""

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cdrmix.cluster import handover
from cdrmix.cluster.findings import KEYS, Answers, Finding, judge, listed
from cdrmix.cluster.hosts import (
    Host,
    address_for_others,
    is_this_machine,
    run_on,
    ssh_command,
    why_out_of_reach,
)
from cdrmix.config.load import shipped
from cdrmix.errors import TrainingError

_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    "from cdrmix.cluster.probe import main; main(sys.argv[1:])"
)
_PROBE = (sys.executable, "-c", _PROGRAM)
# Variables of this process that a start hands to ranks of other hosts, and that are looked at.
_FORWARDED = ("DS_ACCELERATOR", "NCCL_SOCKET_IFNAME")
_DEFAULT_FOLDER = Path("experiments")
# At once; each takes a process of ssh here.
_HOSTS_AT_ONCE = 32
# Large enough for the bandwidth to outweigh the latency of the links.
_ALL_REDUCE_BYTES = 100_000_000
_ALL_REDUCE_SECONDS = 180.0
_ALL_REDUCE_LOG = "doctor-all-reduce.log"
# Pairs of hosts that a finding names.
_NUM_SHOWN = 3
# By a part of ssh's or pdsh's message; the last fits any.
_REMEDIES_OF_SSH = {
    "Permission denied": "ssh-copy-id {name}, then ssh {name} must ask for nothing",
    "Host key verification": "ssh {name} once by hand, to look at its key and accept it",
    "resolve|not known|has no address": "mend the name in the hostfile, or add it to /etc/hosts",
    "refused": "start sshd on {name}: systemctl enable --now ssh",
    "rcmd module": "apt-get install pdsh, or dnf install pdsh-rcmd-ssh",
    "timed out|No route|unreachable|no answer": "ping {name}; a firewall must let port 22 through",
    "no such program": "apt-get install openssh-client",
    "": "ssh -v {name} hostname tells more",
}
_ERROR_LINE = re.compile(r"(error: \S.*|(\w+\.)*\w*(Error|Exception|Interrupt)(: .*)?)")
# pdsh puts the host before a line, torch the rank; an error's name is neither.
_OF_A_RANK = re.compile(r"^(?!\S*(error|Error|Exception|Interrupt):)([\w.-]+: )?(\[rank\d+\]: ?)?")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


class _RunsFolder:
    """Folder of the runs. Where it is not there yet it is made for the checks, and removed again:
    a name that was mistyped must not stay behind as a folder."""

    def __init__(self, path: Path, *, is_named: bool) -> None:
        self.path = path
        self._is_named = is_named  # by the user, who may have mistyped it
        self._made: list[Path] = []  # the innermost first

    def make(self) -> None:
        """Makes the folder and those that it is in; raises OSError."""
        folder = self.path
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Removes the folders that `make` has made, but for those that hold something by now."""
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def judged(self, finding: Finding) -> Finding:
        """The finding about the folder, with the word that it was not there."""
        if not self._made or finding.status != "ok":
            return finding
        detail = f"{finding.detail}; it was not there, and was made for these checks alone"
        if not self._is_named:  # the first run makes it
            return replace(finding, detail=detail)
        folder = shlex.quote(str(self.path))
        remedy = f"mkdir -p {folder}, or another --folder DIR if the name is mistyped"
        return replace(finding, status="warn", detail=detail, remedy=remedy)


def examine(
    hosts: Sequence[Host],
    *,
    folder: Path | None,
    ranks_per_host: int | None,
    with_all_reduce: bool,
) -> Iterator[Finding]:
    """Runs all checks, the cheap ones first, on the hosts or else on this machine.

    Args:
        hosts: of a hostfile, or none.
        folder: of the runs, which all hosts must see; None: `experiments`, where there may be none
            yet.
        ranks_per_host: ranks of the all-reduce on each host; default as the launcher decides.
    """
    runs = _RunsFolder(folder or _DEFAULT_FOLDER, is_named=folder is not None)
    try:
        yield from _examine(hosts, runs, ranks_per_host, with_all_reduce=with_all_reduce)
    finally:
        runs.remove()


def _examine(
    hosts: Sequence[Host], runs: _RunsFolder, ranks_per_host: int | None, *, with_all_reduce: bool
) -> Iterator[Finding]:
    failed = []
    for finding in _without_ranks(hosts, runs, ranks_per_host):
        failed += [finding.check] if finding.status == "FAIL" else []
        yield finding
    # last, because it takes minutes to time out where one of the others fails
    if with_all_reduce and failed:
        detail = f"not run, because these failed: {', '.join(failed)}"
        yield Finding("all-reduce", "warn", detail, "mend those first, then cdrmix doctor again")
    elif with_all_reduce:
        try:
            yield _all_reduce(hosts, runs.path, ranks_per_host)
        except OSError as error:
            yield Finding("all-reduce", "FAIL", str(error), "give another --folder DIR")


def _without_ranks(
    hosts: Sequence[Host], runs: _RunsFolder, ranks_per_host: int | None
) -> Iterator[Finding]:
    """Runs the checks that start no ranks."""
    folder = runs.path
    try:
        folder = runs.path = folder.resolve()
    except (OSError, RuntimeError) as error:  # the present folder is gone; links in a circle
        yield Finding("shared folder", "FAIL", f"{folder}: {error}", "give another --folder DIR")
        return
    targets = [host.name for host in hosts] or ["localhost"]
    if hosts:
        yield _pdsh()
    with ThreadPoolExecutor(max_workers=_HOSTS_AT_ONCE) as pool:  # an unknown name takes seconds
        are_here = pool.map(is_this_machine, targets)
        here = [name for name, is_here in zip(targets, are_here, strict=True) if is_here]
    if len(here) > 1:
        detail = f"{' and '.join(here)} are both this machine, whose devices two ranks would share"
        yield Finding(
            "hosts", "FAIL", detail, "give it one line of the hostfile, with all its slots"
        )
        return
    try:
        runs.make()
        address = address_for_others(targets[0], targets[1:])
    except OSError as error:
        detail = f"{folder}: cannot be made: {error.strerror}"
        yield Finding("shared folder", "FAIL", detail, "give another --folder DIR")
        return
    except TrainingError as error:
        yield Finding("hosts", "FAIL", str(error), _remedy_of_ssh(targets[0], str(error)))
        return
    over_ssh = bool(hosts) and (len(hosts) > 1 or not is_this_machine(targets[0]))
    environment, variables = _environment_file(over_ssh=over_ssh)
    words = ("look", str(folder), address, json.dumps(variables))
    with ThreadPoolExecutor(max_workers=2 * _HOSTS_AT_ONCE) as pool:
        told = {name: pool.submit(_ask, name, *words, over_ssh=over_ssh) for name in targets}
        reached = {host.name: pool.submit(_why_out_of_reach, host.name, hosts) for host in hosts}
    lost = {name: why for name, future in reached.items() if (why := future.result())}
    answers = {name: future.result() for name, future in told.items()}
    for name in lost:  # what only the launcher cannot reach is looked at all the same
        if over_ssh and "failed" in answers[name] and is_this_machine(name):
            answers[name] = _ask(name, *words)
    failed = {name: values["failed"] for name, values in answers.items() if "failed" in values}
    answers = {name: values for name, values in answers.items() if name not in failed}
    yield _reach(answers, {**failed, **lost}, lost)
    if answers:
        slots = {host.name: host.slots for host in hosts}
        ranks = {
            name: ranks_per_host or slots.get(name) or max(1, len(values["devices"]))
            for name, values in answers.items()
        }
        *findings, leftovers = judge(answers, ranks, over_ssh=over_ssh)
        yield from findings
        yield runs.judged(_shared_folder([*answers], folder))
        addresses = {name: values["address"] or name for name, values in answers.items()}
        yield _ports(answers, {**addresses, targets[0]: address})
        yield environment
        yield leftovers


def remove_leftovers_on_hosts(hosts: Sequence[Host]) -> list[str]:
    """Removes leftovers of this user's earlier runs on the hosts; returns a line for each."""
    names = [host.name for host in hosts] or ["localhost"]
    with ThreadPoolExecutor(max_workers=_HOSTS_AT_ONCE) as pool:
        told = pool.map(lambda name: _ask(name, "remove_leftovers"), names)
        return [
            f"{name}: {what}"
            for name, values in zip(names, told, strict=True)
            for what in values.get("removed", [])
        ]


def reason_in(output: str) -> str:
    """Line of a launcher's output that tells best why it failed.

    That is the first error, since ranks that wait for the one that failed report errors after it;
    of a chain of errors the last.
    """
    lines = [_OF_A_RANK.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    reason = None
    for number, line in enumerate(lines):
        if _ERROR_LINE.fullmatch(line):
            reason = line
            following = lines[number + 1] if number + 1 < len(lines) else ""
            if not following.startswith(_CHAINED):
                break
    return reason or (lines[-1] if lines else "it printed nothing")


def _ask(name: str, *words: str, over_ssh: bool = False) -> dict[str, Any]:
    # the wall clock to compare with the host's, the monotonic one to measure
    began = time.time()
    clock = time.monotonic()
    done = run_on(name, [*_PROBE, *words], over_ssh=over_ssh)
    seconds = time.monotonic() - clock
    values = _answer(done.stdout.splitlines())
    if values is None:
        output = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        values = {"failed": output[-1]}
    elif words[0] == "look" and (lacks := KEYS - values.keys()):
        values = {"failed": f"another version of CDRmix, which tells no {', '.join(sorted(lacks))}"}
    return {**values, "began": began, "seconds": seconds}


def _answer(lines: Iterable[str]) -> dict[str, Any] | None:
    """First of the lines that is a JSON object: shells may print others when they start."""
    for line in lines:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict):
                return values
    return None


def _why_out_of_reach(name: str, hosts: Sequence[Host]) -> str | None:
    is_first = name == hosts[0].name
    with_pdsh = shutil.which("pdsh") is not None and not (len(hosts) == 1 and is_this_machine(name))
    return why_out_of_reach(name, is_first=is_first, with_pdsh=with_pdsh)


def _remedy_of_ssh(name: str, message: str) -> str:
    return next(
        remedy.format(name=name)
        for pattern, remedy in _REMEDIES_OF_SSH.items()
        if re.search(pattern, message)
    )


def _pdsh() -> Finding:
    path = shutil.which("pdsh")
    if path:
        return Finding("pdsh", "ok", path)
    detail = "no such program here; DeepSpeed's launcher starts ranks of a hostfile by it"
    return Finding("pdsh", "FAIL", detail, "apt-get install pdsh, or dnf install pdsh-rcmd-ssh")


def _reach(answers: Answers, failures: Mapping[str, str], lost: Mapping[str, str]) -> Finding:
    """Tells which hosts the launcher, or else this command, cannot run a program on."""
    if not failures:
        slowest = max(values["seconds"] for values in answers.values())
        return Finding("hosts", "ok", f"{len(answers)} reached, the slowest in {slowest:.1f} s")
    remedies: dict[str, None] = {}  # without doubles, in order
    for name, why in failures.items():
        setup = f"make setup in the same folder on {name}: all hosts need Python and CDRmix there"
        remedies[_remedy_of_ssh(name, why) if name in lost else setup] = None
    if len({*failures, *answers}) == 1 and is_this_machine(*failures) and lost:
        remedies["or leave out --hostfile, which one machine does not need"] = None
    return Finding("hosts", "FAIL", listed(failures), "; ".join(remedies))


def _environment_file(*, over_ssh: bool) -> tuple[Finding, dict[str, str]]:
    """Checks ~/.deepspeed_env as a start does; also the variables that ranks get from there."""
    check = ".deepspeed_env"
    warnings: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        warnings.append(record.getMessage())
        return False

    variables: dict[str, str] = {}
    handover.logger.addFilter(keep)
    try:
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "variables"
            inherited = handover.users_files()
            handover.write_environment_file(file, inherited=inherited, variables={})
            lines = file.read_text(encoding="utf-8").splitlines()
            if over_ssh:
                variables = dict(line.split("=", 1) for line in lines)
                variables |= {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    except TrainingError as error:
        return Finding(check, "FAIL", str(error), "mend the file, or move it away"), {}
    except (OSError, UnicodeDecodeError) as error:
        detail = f"{Path.home() / check}: cannot be read: {error}"
        return Finding(check, "FAIL", detail, "mend the file, or move it away"), {}
    finally:
        handover.logger.removeFilter(keep)
    if warnings:
        detail, _, remedy = warnings[0].partition(". ")
        return Finding(check, "warn", detail, remedy), variables
    taken_over = ", ".join(f"{path} is taken over" for path in inherited)
    return Finding(check, "ok", taken_over or "none in your home"), variables


def _shared_folder(names: Sequence[str], folder: Path) -> Finding:
    """Checks that all hosts read a file that the first writes, syncs and renames."""
    check = "shared folder"
    file = folder / f".doctor-{uuid4().hex[:8]}"
    text = uuid4().hex
    first, *others = names
    try:
        for attempt in (text, text[::-1]):  # a second time over the first, as `latest` is written
            answer = _ask(first, "write", str(file), attempt)
            if "failed" in answer:
                remedy = "give a --folder that this user can write to"
                return Finding(check, "FAIL", f"{first}: {answer['failed']}", remedy)
            # through a process of its own, as a rank on that host would read it
            with ThreadPoolExecutor(max_workers=_HOSTS_AT_ONCE) as pool:
                seen = pool.map(lambda name: _ask(name, "read", str(file)).get("text"), others)
                blind = [n for n, t in zip(others, seen, strict=True) if t != attempt]
            if blind:
                detail = f"{', '.join(blind)}: does not see in {folder} what {first} writes"
                remedy = "mount one file system (NFS, Lustre, ...) there on all hosts"
                return Finding(check, "FAIL", detail, remedy)
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    seen_by = f", seen by {len(others)} other{'s' * (len(others) > 1)}" if others else ""
    return Finding(check, "ok", f"{folder}: written, synced, renamed{seen_by}")


def _ports(answers: Answers, addresses: Mapping[str, str]) -> Finding:
    """Checks that all hosts can connect to each other on ports that nobody chose."""
    first, *others = answers
    words = [*_PROBE, "listen"]  # ends after a minute, also where killing ssh does not reach it
    with contextlib.ExitStack() as listeners, ThreadPoolExecutor(_HOSTS_AT_ONCE) as pool:
        streams = {}
        for name in answers:
            command = words if is_this_machine(name) else ssh_command(name, words)
            listener = listeners.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
                )
            )
            listeners.callback(listener.terminate)
            assert listener.stdout is not None, "asked for above"
            streams[name] = listener.stdout
        told = pool.map(_answer, streams.values())
        ports = [(values or {}).get("port", 0) for values in told]
        places = {n: (addresses[n], port) for n, port in zip(answers, ports, strict=True)}

        def errors_of(caller: str) -> dict[str, str]:
            # a machine that is alone calls itself
            called = {n: p for n, p in places.items() if n != caller or not others}
            told = _ask(caller, "call_addresses", json.dumps(called))
            errors: dict[str, str] = told.get("errors") or {}
            return dict.fromkeys(called, told["failed"]) if "failed" in told else errors

        calls = dict(zip(answers, pool.map(errors_of, answers), strict=True))
    failures = [
        f"{caller} to {name} ({':'.join(map(str, places[name]))}): {error}"
        for caller, errors in calls.items()
        for name, error in errors.items()
    ]
    range_text = "{}-{}".format(*answers[first]["limits"]["ports"])
    if failures:
        more = len(failures) - _NUM_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        remedy = (
            f"a firewall? Let the hosts reach each other on TCP ports {range_text}: ufw allow from "
            "SUBNET, or firewall-cmd --zone=trusted --add-source=SUBNET"
        )
        return Finding("ports", "FAIL", "; ".join(failures[:_NUM_SHOWN]) + rest, remedy)
    who = f"{len(answers)} hosts reach each other" if others else "this machine reaches itself"
    return Finding("ports", "ok", f"{who} on a port of {range_text}")


def _all_reduce(hosts: Sequence[Host], folder: Path, ranks_per_host: int | None) -> Finding:
    """Sums a hundred megabytes over all ranks, started as a run is."""
    log = folder / _ALL_REDUCE_LOG
    with (
        tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as name,
        log.open("w", encoding="utf-8") as output,
    ):
        out = Path(name) / "result.json"
        words = ["--bytes", str(_ALL_REDUCE_BYTES), "--out", str(out)]
        began = time.monotonic()
        try:
            with handover.LauncherStart(
                hosts,
                words,
                ranks_per_host=ranks_per_host,
                folder=Path(name),
                variables={},
                script=shipped("launch") / "all_reduce.py",
                output=output,
            ) as start:
                code = start.wait_for_launcher(_ALL_REDUCE_SECONDS)
                seconds = time.monotonic() - began
        except TrainingError as error:  # says what to try
            log.unlink()
            return Finding("all-reduce", "FAIL", str(error))
        result = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None
    if code == 0 and result is not None:
        log.unlink()
        if result["ranks"] == 1:  # no byte crosses a link: its bandwidth would read as 0
            detail = "one rank, so no link to measure: the launcher, torch and DeepSpeed start"
            return Finding("all-reduce", "ok", detail)
        work = f"{result['bytes'] / 1e6:.0f} MB over {result['ranks']} ranks"
        speed = f"{result['bus_bytes_per_second'] / 1e9:.2f} GB/s a link"
        return Finding("all-reduce", "ok", f"{work} in {result['seconds']:.3f} s: {speed}")
    end = f"the launcher ended with code {code}" if code is not None else "time ran out"
    why = reason_in(log.read_text(encoding="utf-8", errors="replace"))
    return Finding("all-reduce", "FAIL", f"{end} after {seconds:.0f} s: {why}", f"read {log}")

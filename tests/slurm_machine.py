"""SLURM on this machine alone, for tests: a controller and nodes that share its cores.

Needs root, SLURM and munge (Debian: slurm-wlm, munge), neither systemd nor files outside a folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
_START_SECONDS = 30


def why_not() -> str | None:
    """Why SLURM cannot run here; None when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "needs root"


@contextlib.contextmanager
def slurm_machine(folder: Path, *, num_nodes: int = 2) -> Iterator[Path]:
    """A running SLURM with one partition; gives the file that SLURM_CONF has to name."""
    configuration = folder / "slurm.conf"
    nodes = [f"n{number}" for number in range(num_nodes)]
    _write_files(folder, configuration, nodes)
    try:
        _start(
            *("munged", "--force", f"--socket={folder}/munge/socket"),
            *(f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        )
        _start("slurmctld", "-c", "-f", str(configuration))
        for node in nodes:
            _start("slurmd", "-N", node, "-f", str(configuration))
        _wait_until_idle(configuration, num_nodes)
        yield configuration
    finally:
        for pid_file in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)


def _start(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _write_files(folder: Path, configuration: Path, nodes: list[str]) -> None:
    for name in ("munge", "state", *nodes):
        (folder / name).mkdir(parents=True)
    # munged refuses a socket below a folder that others may write to or cannot enter.
    for place in (folder, folder / "munge"):
        place.chmod(0o755)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(nodes))
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",
        "CryptoType=crypto/munge",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        "ReturnToService=2",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=4000"
            for node, port in zip(nodes, ports, strict=True)
        ),
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    configuration.write_text("\n".join(lines) + "\n")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        holders = [opened.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [holder.getsockname()[1] for holder in holders]


def _wait_until_idle(configuration: Path, num_nodes: int) -> None:
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    deadline = time.monotonic() + _START_SECONDS
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.stdout.strip() == str(num_nodes):
            return
        assert time.monotonic() < deadline, f"SLURM did not start: {done.stdout}{done.stderr}"
        time.sleep(0.2)

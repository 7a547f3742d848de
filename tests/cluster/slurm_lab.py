"""A SLURM of a test's own: munged, slurmctld and two slurmd on this machine, without systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cdrmix.network import free_port
from tests.cluster.lab_names import VARIABLE, end_processes, end_processes_of_dead_labs, new_name
from tests.harness import RANK_ENVIRONMENT, ROOT

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
_SECONDS_TO_START = 60

# Requeued jobs wait as long as a credential lasts (cred_expire): 5 s in place of two minutes.
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20 \
PreemptMode=REQUEUE
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmLab:
    """Commands on a SLURM that runs in `folder`."""

    def __init__(self, folder: Path, *, binds_tasks: bool) -> None:
        self._folder = folder
        self._binds_tasks = binds_tasks
        self._name = new_name()
        self.environment = {
            **os.environ,
            **RANK_ENVIRONMENT,
            "SLURM_CONF": str(folder / "slurm.conf"),
            VARIABLE: self._name,
        }

    def run(self, *command: str) -> str:
        """Output of a command that succeeds."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING; empty when it has left the queue."""
        done = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    def start(self) -> None:
        """Start the daemons and wait for two idle nodes."""
        folder = self._folder
        (folder / "munge").mkdir()
        (folder / "munge").chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = os.uname().nodename.partition(".")[0]
        nodes = "\n".join(
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
            f"CPUs=2 RealMemory=8000 State=UNKNOWN {'CpuBind=core' if self._binds_tasks else ''}"
            for n in (1, 2)
        )
        text = _CONFIGURATION.format(
            folder=folder,
            host=host,
            port=free_port(),
            nodes=nodes,
            task_plugin="task/affinity" if self._binds_tasks else "task/none",
        )
        (folder / "slurm.conf").write_text(text)
        options = ("socket=munge/socket", "key-file=munge.key", "pid-file=munged.pid")
        files = ("log-file=munged.log", "seed-file=munge.seed")
        flags = []
        for option in (*options, *files):
            name, _, file = option.partition("=")
            flags.append(f"--{name}={folder / file}")
        self.run("munged", "--force", *flags)
        self.run("slurmctld", "-c")
        for node in ("n1", "n2"):
            (folder / f"spool.{node}").mkdir()
            self.run("slurmd", "-N", node)
        deadline = time.monotonic() + _SECONDS_TO_START
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D") != "2":
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.25)

    def stop(self) -> None:
        """Cancel what runs and end the daemons, and whatever they left."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--user=root")
            deadline = time.monotonic() + 30
            while self.run("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.25)
        end_processes(self._name)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))


def missing() -> str | None:
    """Why there can be no such SLURM here, or None."""
    if os.getuid() != 0:
        return "needs root, to run SLURM's daemons"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"no programs {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else None


@contextlib.contextmanager
def slurm_lab(folder: Path, *, binds_tasks: bool = False) -> Iterator[SlurmLab]:
    """A running SLURM with nodes n1 and n2; skips the test where there can be none.

    `binds_tasks` has a task run on the cores alone that it was given; both nodes have the same.
    """
    reason = missing()
    if reason:
        pytest.skip(reason)
    end_processes_of_dead_labs()
    folder.chmod(0o755)
    lab = SlurmLab(folder, binds_tasks=binds_tasks)
    lab.environment["PATH"] = _path()
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


def _path(extra: Sequence[str] = ("/usr/sbin", "/sbin")) -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *extra])

"""Figures of a host beside the metrics of a run: processors, memory, disks, network.

They are in a file of their own, since lines of metrics.jsonl are the same in equal runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import psutil

from cdrmix.hooks import Hook, RunView
from cdrmix.monitoring.metrics import record
from cdrmix.monitoring.sinks import MetricsFile

FILE = "system.jsonl"
_OTHER_HOSTS = "system-rank{rank}.jsonl"


class SystemFigures(Hook):
    """Writes a line for each one of metrics.jsonl, on the first rank of each host."""

    def __init__(self, local_rank: int) -> None:
        self._is_first = local_rank == 0
        self._file: MetricsFile | None = None
        self._before: dict[str, int] = {}  # counters at the last line

    def on_start(self, run: RunView) -> None:
        """Opens the file, and cuts off what lies behind the step that the run goes on from."""
        if not self._is_first:
            return
        name = FILE if run.rank == 0 else _OTHER_HOSTS.format(rank=run.rank)
        self._file = MetricsFile(run.directory / name)
        self._file.truncate_after(run.step)
        psutil.cpu_percent()  # counts from here
        self._before = _counters()

    def on_log(self, step: int, record_of_step: Mapping[str, float]) -> None:
        """Writes a line, and adds nothing to that of the metrics."""
        if self._file is not None:
            self._file.write(record(step=step, **self._figures()))

    def on_rewind(self, step: int) -> None:
        """Cuts off what lies behind the step."""
        if self._file is not None:
            self._file.truncate_after(step)

    def on_error(self, exception: BaseException) -> None:
        """Closes the file."""
        self._close()

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Closes the file."""
        self._close()

    def _figures(self) -> dict[str, float]:
        now = _counters()
        since = {name: count - self._before.get(name, count) for name, count in now.items()}
        self._before = now
        return {
            "system/cpu_share": psutil.cpu_percent() / 100,
            "system/load": os.getloadavg()[0],
            "system/memory_available_bytes": psutil.virtual_memory().available,
            **since,
        }

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _counters() -> dict[str, int]:
    """Bytes since the start of the host; without those that it does not count."""
    counters = {}
    if (disks := psutil.disk_io_counters()) is not None:
        counters["system/disk_read_bytes"] = disks.read_bytes
        counters["system/disk_written_bytes"] = disks.write_bytes
    if (network := psutil.net_io_counters()) is not None:
        counters["system/network_received_bytes"] = network.bytes_recv
        counters["system/network_sent_bytes"] = network.bytes_sent
    return counters

"""Trackers that fail, and readers of what trackers have written."""

from __future__ import annotations

import json
import resource
import signal
import sqlite3
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cdrmix.tracking import Line, TrackedRun, Tracker
from cdrmix.tracking.tensorboard_tracker import TensorBoardTracker


class Raises(Tracker):
    """Fails in every call but the first."""

    def write(self, lines: Sequence[Line]) -> None:
        print("noise of a package")
        raise RuntimeError("no such server")

    def rewind(self, step: int) -> None:
        raise RuntimeError("no such server")

    def close(self) -> None:
        raise RuntimeError("no such server")


class Blocks(Tracker):
    """Stands still for a minute in every call, and hears no signal."""

    def write(self, lines: Sequence[Line]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(1)


class OnFullDisk(TensorBoardTracker):
    """TensorBoard on a disk that has room for a line or two."""

    def open(self, run: TrackedRun) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        super().open(run)
        size = max(file.stat().st_size for file in run.folder.glob("events*"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, resource.RLIM_INFINITY))


class Service(Tracker):
    """Has a secret among its options."""

    class Options(BaseModel):
        api_key: str
        project: str

    def __init__(self, options: Options) -> None:
        self.options = options


def points_of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, as the server of TensorBoard has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def points_of_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by key, of the runs that are not deleted."""
    query = (
        "select key, step, case is_nan when 1 then null else value end from metrics "
        "join runs using (run_uuid) where lifecycle_stage = 'active' order by step"
    )
    points = defaultdict(list)
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        for key, step, value in database.execute(query):
            points[key].append((step, float("nan") if value is None else value))
    return points


def rows_of_wandb(folder: Path) -> list[list[dict[str, Any]]]:
    """Rows of each offline run in the order of their folders."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        rows = []
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
                rows.append({key: json.loads(text) for key, text in items.items()})
        runs.append(rows)
    return runs


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a file of W&B: behind 7 bytes a log as LevelDB has it, in blocks of 32 KiB, each
    part with a checksum, its length and its kind (1 whole, 2 first, 3 middle, 4 last)."""
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""

"""TensorBoard: one file of events for each start of a run, all in one folder.

The files are written with the package `tensorboard` alone: `torch.utils.tensorboard` would bring
torch into the writer's process. Values are rounded to float32: scripts that read events, and the
rule by which points of a killed start are hidden there, know no float64.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.tracking import TensorBoardOptions
from cdrmix.tracking.tracker import Line, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Events for TensorBoard; values that are not finite as they are."""

    Options = TensorBoardOptions

    def __init__(self, options: TensorBoardOptions) -> None:
        self._by_tokens = options.by_tokens

    def open(self, run: TrackedRun) -> None:
        """Begins a file of events, of which TensorBoard takes the steps after `run.step` from."""
        self._run = run
        self._files = [(_EventFile(run.folder), _step)]
        if self._by_tokens:
            self._files.append((_EventFile(run.folder / "by_tokens"), _tokens))
        self.rewind(run.step)
        self._files[0][0].write_config(run.config, step=max(run.step, 0))

    def write(self, lines: Sequence[Line]) -> None:
        """Writes the points of the lines in one piece."""
        for file, place_of in self._files:
            file.write_points((place, line) for line in lines if (place := place_of(line)) >= 0)

    def rewind(self, step: int) -> None:
        """Has TensorBoard forget the points after `step`, when it reads on here."""
        for file, place_of in self._files:
            place = step
            if place_of is _tokens:
                earlier = [_tokens(line) for line in self._run.lines(up_to=step)]
                place = max(earlier, default=-1)
            file.write_start(place + 1)

    def close(self) -> None:
        """Closes the files."""
        for file, _ in self._files:
            file.close()


def _step(line: Line) -> int:
    return line.step


def _tokens(line: Line) -> int:
    return int(line.values.get("tokens_seen", -1))


class _EventFile:
    """A file of events, which always ends with a whole one: TensorBoard stops at a broken one."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2

        self._make_event: Callable[..., Any] = event_pb2.Event
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names: nanoseconds tell two
        # starts within a second apart.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._append([event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")])

    def write_start(self, step: int) -> None:
        """Marks a start at `step`: points of this step and later ones before the mark are void."""
        from tensorboard.compat.proto import event_pb2

        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append([event_pb2.Event(wall_time=time.time(), step=step, session_log=start)])

    def write_config(self, config: Any, *, step: int) -> None:
        """Shows the configuration as a text."""
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        text = "\n".join(f"    {line}" for line in json.dumps(config, indent=2).splitlines())
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        summary = summary_pb2.Summary()
        summary.value.add(
            tag="config",
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=tensor_pb2.TensorProto(
                dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape={}
            ),
        )
        self._append([self._make_event(wall_time=time.time(), step=step, summary=summary)])

    def write_points(self, points: Iterable[tuple[int, Line]]) -> None:
        """Writes lines, each at its place on the axis."""
        from tensorboard.compat.proto import summary_pb2

        events = []
        for place, line in points:
            summary = summary_pb2.Summary()
            for key, value in line.values.items():
                if key != "step":  # the axis
                    summary.value.add(tag=key, simple_value=value)
            events.append(self._make_event(wall_time=line.time, step=place, summary=summary))
        self._append(events)

    def close(self) -> None:
        self._file.close()

    def _append(self, events: Sequence[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        made = io.BytesIO()
        records = RecordWriter(made)
        for event in events:
            records.write(event.SerializeToString())
        end = self._file.tell()
        left = made.getvalue()
        try:
            while left:  # a write to a nearly full disk may take a part only
                left = left[self._file.write(left) :]
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            self._file.seek(end)
            raise

"""Where metrics go: a file of lines, a progress bar or plain lines, and whole files at once.

JSON has no not-a-number and no infinities. They are written as the strings "NaN", "Infinity" and
"-Infinity": valid JSON, read back by `float()`, and still telling which of the three it was.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from tqdm import tqdm
from tqdm.utils import ObjectWrapper

from cdrmix.errors import StateError
from cdrmix.log import get_logger

logger = get_logger(__name__)

# Updates with metrics that the time left is estimated from: enough to span evaluations and saves.
_ETA_UPDATES = 50


class MetricsFile:
    """metrics.jsonl: one record per line, floats in full precision, no line held back.

    A killed process leaves whole lines and at most one half-written last one. After a crash of the
    host, lines since the last `sync` may be missing.
    """

    def __init__(self, path: Path) -> None:
        """Append to `path`, which is made if it is missing.

        Raises:
            StateError: here and in every method, if the file cannot be written.
        """
        self.path = path
        self._open()

    def write(self, record: Mapping[str, float]) -> None:
        """Append one record."""
        left = (_to_json(record) + "\n").encode()
        with _disk_faults(self.path):
            while left:
                left = left[self._file.write(left) :]

    def truncate_after(self, step: int) -> None:
        """Keep the lines up to `step`, atomically: a resumed run writes the later ones again.

        The later ones stay beside it, in metrics.cut-<n>.jsonl. A half-written last line goes; so
        does any other line that is not a record, with a warning.
        """
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        records = [(line, _parse(line)) for line in lines if line]
        kept = [line + "\n" for line, found in records if found and found["step"] <= step]
        unreadable = sum(found is None for _, found in records[:-1])
        if unreadable:
            logger.warning("%s: dropped %d unreadable lines", self.path, unreadable)
        cut = [line + "\n" for line, found in records if found and found["step"] > step]
        if cut:
            number = 1
            while (aside := self.path.with_suffix(f".cut-{number}.jsonl")).exists():
                number += 1
            write_text_atomic(aside, "".join(cut))
        self.close()
        write_text_atomic(self.path, "".join(kept))
        self._open()

    def sync(self) -> None:
        """Force written lines to the disk: before a checkpoint of their steps is named."""
        with _disk_faults(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Release the file; nothing is written after this."""
        self._file.close()

    def _open(self) -> None:
        # Unbuffered: a buffer that a full disk refused would be tried, and fail, again at exit.
        with _disk_faults(self.path):
            self._file = open(self.path, "ab", buffering=0, opener=_no_link)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a metrics.jsonl, non-finite values as floats again.

    Lines that are not records are left out: the last line of a live run may be half-written.

    Raises:
        StateError: if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    return [found for found in map(_parse, text.split("\n")) if found]


class _Lasting(ObjectWrapper):
    """A stream that takes what is written after its reader is gone.

    A bar whose write fails leaves tqdm's lock locked, and every other thread that writes waiting.
    """

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._wrapped.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._wrapped.flush()

    def __eq__(self, other: object) -> bool:
        """What the stream itself equals: by that tqdm knows whose lines go through a bar."""
        return bool(self._wrapped == getattr(other, "_wrapped", other))

    def __hash__(self) -> int:
        return hash(self._wrapped)


class Progress:
    """Shows how far a run is: a bar on a terminal, plain lines anywhere else."""

    def __init__(self, total_steps: int, *, initial: int = 0, stream: TextIO) -> None:
        """Start at step `initial` of `total_steps`; a resumed run starts where it stopped."""
        self._total_steps = total_steps
        self._stream = _Lasting(stream)
        self._seen = deque([(initial, time.monotonic())], maxlen=_ETA_UPDATES)
        self._bar: tqdm | None = None
        if stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=initial,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            )

    def update(self, step: int, record: Mapping[str, float] | None = None) -> None:
        """Tell that `step` steps are done; with a record, show its metrics too.

        A plain line appears only with a record; the bar moves with every call. A record that holds
        an evaluation puts a line of its own above the bar. Training goes on where nothing can be
        shown, because whoever read the stream is gone.
        """
        parts = [] if record is None else self._describe(step, record)
        evaluation = describe_evaluation(record or {})
        count = f"{step:>{len(str(self._total_steps))}}/{self._total_steps}"
        if self._bar is not None:
            if parts:
                self._bar.set_description_str(" ".join(parts), refresh=False)
            self._bar.update(step - self._bar.n)
            if parts:
                self._bar.refresh()
        elif parts:
            self._say("  ".join([f"step {count}", *parts]))
        if evaluation:
            self._say("  ".join([f"eval {count}", evaluation]))

    def close(self) -> None:
        """Leave the bar as it stands and end its line."""
        if self._bar is not None:
            self._bar.close()

    def _describe(self, step: int, record: Mapping[str, float]) -> list[str]:
        self._seen.append((step, time.monotonic()))
        return [*describe_step(record), f"eta {duration(self._seconds_left())}"]

    def _seconds_left(self) -> float:
        """Remaining steps at the recent pace, evaluations and saves included."""
        (first, began) = self._seen[0]
        (last, now) = self._seen[-1]
        return (self._total_steps - last) * (now - began) / max(last - first, 1)

    def _say(self, line: str) -> None:
        tqdm.write(line, file=self._stream)
        self._stream.flush()


def describe_step(record: Mapping[str, float]) -> list[str]:
    """Short texts of a record's metrics, most wanted first; what was not measured is left out."""
    formats = {
        "loss": "loss {:.4f}",
        "stage_b/loss": "loss {:.4f}",
        "stage_b/recall": "recall {:.3f}",
        "stage_b/answered": "answered {:.3f}",
        "policy/return": "return {:.3f}",
        "policy/success": "success {:.3f}",
        "policy/kl": "kl {:.4f}",
        "learning_rate": "lr {:.2e}",
        "grad_norm": "grad {:.2f}",
        "tokens_per_second": "{:,.0f} tok/s",
    }
    parts = [text.format(record[name]) for name, text in formats.items() if name in record]
    if "memory_peak_bytes" in record:
        parts.append(f"mem {record['memory_peak_bytes'] / 2**30:.1f} GiB")
    return parts


def describe_evaluation(record: Mapping[str, float]) -> str:
    """The evaluation in a record as one line of text; empty when there was none."""
    formats = {
        "eval/loss": "loss {:.4f}",
        "eval/perplexity": "perplexity {:.2f}",
        "eval/bits_per_byte": "{:.3f} bits/byte",
        "eval/seconds": "took {:.1f}s",
    }
    return "  ".join(text.format(record[name]) for name, text in formats.items() if name in record)


def duration(seconds: float) -> str:
    """Two leading units of a time: 45s, 2m10s, 1h05m, 3d04h."""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def write_json_atomic(path: Path, obj: Any) -> None:
    """Write `obj` as indented JSON so that a reader sees the old file or the new one, whole.

    Raises:
        StateError: if it cannot be written; the old file then stays as it was.
    """
    write_text_atomic(path, _to_json(obj, indent=2) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to a temporary neighbour, force it to the disk, then rename it.

    Raises:
        StateError: if it cannot be written; the old file then stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _disk_faults(path):
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _no_link(path: str, flags: int) -> int:
    """Opens a file of that very folder: a link that somebody left there would lead elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def _disk_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written: {error.strerror}. Free space, or check the rights of "
            f"{path.parent}, or choose another --run-dir."
        ) from error


def _to_json(obj: Any, indent: int | None = None) -> str:
    return json.dumps(_without_non_finite(obj), indent=indent, allow_nan=False)


def _without_non_finite(obj: Any) -> Any:
    if isinstance(obj, Mapping):
        return {key: _without_non_finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_without_non_finite(value) for value in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else ("Infinity" if obj > 0 else "-Infinity")
    return obj


def _parse(line: str) -> dict[str, float] | None:
    """One record, or None for a line that is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return None
    special = ("NaN", "Infinity", "-Infinity")
    return {key: float(value) if value in special else value for key, value in found.items()}

"""Destinations of metrics: metrics.jsonl, a progress bar or plain lines, and whole files at once.

JSON has no not-a-number and no infinities. They are written as the strings "NaN", "Infinity" and
"-Infinity", which are valid JSON and which `float()` reads.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.utils import ObjectWrapper

from cdrmix.config.objectives import OF_TOKENS
from cdrmix.errors import StateError
from cdrmix.log import columns, get_logger, log_shown, told_columns

logger = get_logger(__name__)

# Updates behind the estimate of the remaining time: enough to span evaluations and saves.
_ETA_UPDATES = 50
# Steps behind the speed beside the bar: enough to be steady, few enough to follow a change.
_SPEED_STEPS = 10
# Cells of a bar that a narrow terminal leaves before metrics are left out.
_BAR_CELLS = 10
# Metrics of a progress line in their order.
_STEP_FORMATS = {
    "loss": "loss {:.4f}",
    **{f"objective/{name}/loss": name + " {:.3f}" for name in OF_TOKENS},
    "stage_b/loss": "loss {:.4f}",
    "stage_b/recall": "recall {:.3f}",
    "stage_b/agreement": "agreement {:.3f}",
    "stage_b/answered": "answered {:.3f}",
    "policy/return": "return {:.3f}",
    "policy/success": "success {:.3f}",
    "policy/kl": "kl {:.4f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
}
# Metrics that a narrow terminal leaves out beside the bar, the first of them first.
_DISPENSABLE = (
    "memory_peak_bytes",
    *(f"objective/{name}/loss" for name in OF_TOKENS),
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "eta",
)
_EVALUATION_FORMATS = {
    "eval/loss": "loss {:.4f}",
    "eval/ema_loss": "of the average {:.4f}",
    "eval/perplexity": "perplexity {:.2f}",
    "eval/bits_per_byte": "{:.3f} bits/byte",
    "eval/seconds": "took {:.1f}s",
}
_FORGETTING_FORMATS = {
    "cpt/forgetting_nats": "forgetting {:+.4f}",
    "cpt/gain_nats": "gain {:+.4f}",
    "cpt/old_loss": "old {:.4f}",
    "cpt/new_loss": "new {:.4f}",
    "cpt/seconds": "took {:.1f}s",
}
# Lines of their own, by the word that they begin with.
_OWN_LINES = {"eval": _EVALUATION_FORMATS, "cpt": _FORGETTING_FORMATS}


class MetricsFile:
    """metrics.jsonl: one record per line, floats in full precision, no buffer.

    A killed process leaves whole lines and at most one half-written last one. After a crash of the
    host, lines since the last `sync` may be missing.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates `path`; raises StateError, as each method, if it cannot be written."""
        self.path = path
        self._open()

    def write(self, record: Mapping[str, float]) -> None:
        """Appends one record."""
        # A bare NaN is no JSON, and other readers refuse the whole file.
        line = (json.dumps(without_non_finite(record), allow_nan=False) + "\n").encode()
        with _disk_faults(self.path):
            while line:  # a write to a nearly full disk may take a part only
                line = line[self._file.write(line) :]

    def truncate_after(self, step: int) -> None:
        """Cuts the lines after `step`, atomically, into metrics.cut-<n>.jsonl beside it.

        A resumed run writes them again. What is no record is dropped, with a warning unless it is
        a half-written last line.
        """
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        records = [(line, parse_record(line)) for line in lines if line]
        earlier = [line + "\n" for line, record in records if record and record["step"] <= step]
        later = [line + "\n" for line, record in records if record and record["step"] > step]
        unreadable = sum(record is None for _, record in records[:-1])
        if unreadable:
            logger.warning("%s: dropped %d unreadable lines", self.path, unreadable)
        if later:
            names = (self.path.with_suffix(f".cut-{number}.jsonl") for number in count(1))
            write_text_atomic(next(path for path in names if not path.exists()), "".join(later))
        # The open file would go on in the old one after the rename.
        self.close()
        write_text_atomic(self.path, "".join(earlier))
        self._open()

    def sync(self) -> None:
        """Forces written lines to the disk: before a checkpoint of their steps is named."""
        with _disk_faults(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; nothing is written after this."""
        self._file.close()

    def _open(self) -> None:
        # A link that somebody left in the run directory would lead elsewhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with _disk_faults(self.path):
            descriptor = os.open(self.path, flags, 0o666)
        # Unbuffered: a buffer that a full disk refused would be tried, and fail, again at exit.
        self._file = os.fdopen(descriptor, "ab", buffering=0)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the records of a metrics.jsonl; skips lines that are none, such as a half-written one.

    Raises StateError if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    return [record for record in map(parse_record, text.split("\n")) if record]


class _Lasting(ObjectWrapper):
    """A stream that swallows writes once its reader is gone.

    A bar whose write fails leaves tqdm's lock held, and every other thread that writes waits.
    """

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._wrapped.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._wrapped.flush()

    def __eq__(self, other: object) -> bool:
        """Compares as the stream itself, by which tqdm finds the bars on a stream."""
        return bool(self._wrapped == getattr(other, "_wrapped", other))

    def __hash__(self) -> int:
        return hash(self._wrapped)


class Progress:
    """Progress of a run: a bar on a terminal, plain lines anywhere else and in the log's files.

    The bar moves with every step, and shows the newest loss known and the speed of the last steps.
    A terminal without a width has no room for a bar, and gets the lines.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        initial: int = 0,
        tokens_per_step: int | None = None,
        stream: TextIO,
    ) -> None:
        """Starts at step `initial` of `total_steps`, which is not 0 for a resumed run.

        Without `tokens_per_step` (of all ranks), a speed is shown only if records have one.
        """
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._terminal = stream
        self._stream = _Lasting(stream)
        self._seen = deque([(initial, time.monotonic())], maxlen=_ETA_UPDATES)
        self._seconds = deque[float](maxlen=_SPEED_STEPS)  # of the last steps
        self._newest: dict[str, float] = {}  # metrics beside the bar
        self._bar: tqdm | None = None
        if stream.isatty() and told_columns(stream) != 0:
            self._bar = tqdm(
                total=total_steps,
                initial=initial,
                file=self._stream,
                dynamic_ncols=True,
                miniters=1,  # tqdm would learn to pass over steps, and stand still at a slow one
                bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            )

    def update(self, step: int, record: Mapping[str, float] | None = None) -> None:
        """Moves to `step` completed steps; with a record, shows its metrics too.

        A plain line appears only with a record; the bar moves with every call. An evaluation, and a
        measure of what is forgotten, have lines of their own, which are shown above the bar too.
        """
        if step < self._seen[-1][0]:  # the run went back: what was seen of later steps is void
            self._seen.clear()
            self._seen.append((step, time.monotonic()))
            self._newest = {}
        if record is not None:
            self._seen.append((step, time.monotonic()))
            self._newest = dict(record)
        self._move(step, redraws=record is not None)
        line = record or {}
        lines = []
        if any(name in line for name in _STEP_FORMATS):  # none before the first step
            lines.append(("step", list(self._texts(step, line).values())))
        for kind, formats in _OWN_LINES.items():
            if texts := [text.format(line[n]) for n, text in formats.items() if n in line]:
                lines.append((kind, texts))
        place = f"{step:>{len(str(self._total_steps))}}/{self._total_steps}"
        for kind, texts in lines:
            text = "  ".join([f"{kind} {place}", *texts])
            if self._bar is None or kind != "step":
                tqdm.write(text, file=self._stream)
                self._stream.flush()
            log_shown(logger, text)

    def step_done(self, step: int, seconds: float) -> None:
        """Moves the bar to `step` completed steps, the last of which took `seconds`."""
        self._seconds.append(seconds)
        if self._tokens_per_step is not None:
            taken = max(sum(self._seconds), 1e-9)
            self._newest["tokens_per_second"] = len(self._seconds) * self._tokens_per_step / taken
        self._move(step)

    def loss_known(self, loss: float) -> None:
        """Shows the loss of the last step beside the bar."""
        self._newest["loss"] = loss
        if self._bar is not None:
            self._move(int(self._bar.n), redraws=True)

    def close(self) -> None:
        """Leaves the bar as it stands and ends its line; once more does nothing."""
        if self._bar is not None:
            self._bar.close()

    def _move(self, step: int, *, redraws: bool = False) -> None:
        """Moves the bar and what stands beside it; the terminal is drawn ten times a second, or at
        once if `redraws`."""
        if self._bar is None:
            return
        texts = self._texts(step, self._newest) if step else {}
        width = columns(self._terminal) or 80
        room = width - len(f"{step}/{self._total_steps} || ") - _BAR_CELLS
        for name in _DISPENSABLE:
            if len(" ".join(texts.values())) > room:
                texts.pop(name, None)
        # a bar is of one cell at least, and tqdm leaves the last column free
        if len(" ".join(texts.values())) > room + _BAR_CELLS - 2:
            texts = {}  # it would be cut within a number, which then reads as another
        self._bar.set_description_str(" ".join(texts.values()), refresh=False)
        self._bar.update(step - self._bar.n)
        if redraws:
            self._bar.refresh()

    def _texts(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Texts of the metrics that are there, in their order, and of the time left."""
        texts = {n: text.format(metrics[n]) for n, text in _STEP_FORMATS.items() if n in metrics}
        if "memory_peak_bytes" in metrics:
            texts["memory_peak_bytes"] = f"mem {metrics['memory_peak_bytes'] / 2**30:.1f} GiB"
        first, began = self._seen[0]
        # The recent pace, evaluations and saves included.
        pace = (time.monotonic() - began) / max(step - first, 1)
        return texts | {"eta": f"eta {duration((self._total_steps - step) * pace)}"}


def duration(seconds: float) -> str:
    """Formats a time by its two leading units: 45s, 2m10s, 1h05m, 3d04h."""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def write_json_atomic(path: Path, obj: Any) -> None:
    """Writes `obj` as indented JSON by `write_text_atomic`."""
    text = json.dumps(without_non_finite(obj), indent=2, allow_nan=False)
    write_text_atomic(path, text + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to a temporary neighbour, forces it to the disk, then renames it.

    A reader sees the whole old file or the whole new one. Raises StateError if it cannot be
    written; the old file then stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _disk_faults(path):
        try:
            temporary.unlink(missing_ok=True)
            # "x" refuses a link of that name, which would lead elsewhere.
            with open(temporary, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                # Before the rename: after a crash of the host the new name must not be empty.
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _disk_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written: {error.strerror}. Free space, or check the rights of "
            f"{path.parent}, or choose another --run-dir."
        ) from error


def without_non_finite(obj: Any) -> Any:
    """Copy of a JSON value with the names of non-finite numbers in their place."""
    if isinstance(obj, Mapping):
        return {key: without_non_finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [without_non_finite(value) for value in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else ("Infinity" if obj > 0 else "-Infinity")
    return obj


def parse_record(line: str) -> dict[str, float] | None:
    """Reads a record, non-finite values as floats again; None for a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # The rest of a half-written line may be JSON, such as a number, and no record.
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    # Only these three strings are numbers; another string stays as it is.
    special = ("NaN", "Infinity", "-Infinity")
    return {key: float(value) if value in special else value for key, value in record.items()}

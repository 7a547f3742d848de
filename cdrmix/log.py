"""Rank-aware logging: one message per run rather than one per rank. No torch. Rank 0 logs from
INFO; the other ranks log from WARNING, each line marked with the rank."""

import contextlib
import logging
import sys
import threading
from pathlib import Path

from tqdm import tqdm

_ROOT = "cdrmix"
# tqdm's default lock is shared with forked processes: one that is killed while it writes would
# leave it locked for all others. A thread lock is enough: only threads share a terminal's bars.
tqdm.set_lock(threading.RLock())


def get_logger(name: str) -> logging.Logger:
    """Logger below the root `cdrmix`, so that a user can silence or redirect all of them."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


class _ProgressAwareHandler(logging.Handler):
    """Writes to stderr, above a live progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except OSError:  # its reader is gone, such as a killed launcher: go on without
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Reports once that its file cannot be written, instead of a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        reason = sys.exc_info()[1]
        root = logging.getLogger(_ROOT)
        root.removeHandler(self)
        with contextlib.suppress(OSError):  # closing flushes the rest, which fails again
            self.close()
        text = "warning: %s: cannot be written (%s): log lines go to stderr only from here on"
        root.warning(text, self.baseFilename, reason)


def configure(*, rank: int = 0) -> None:
    """Sends the project's log lines to stderr; called once per process, before anything is logged.
    The global `rank` 0 logs from INFO, the others from WARNING."""
    root = logging.getLogger(_ROOT)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    mark = "" if rank == 0 else f"[rank {rank}] "
    handler = _ProgressAwareHandler()
    handler.setFormatter(logging.Formatter(f"{mark}%(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def log_to_file(path: Path) -> None:
    """Appends the log lines of this process to `path` too, with time and level."""
    handler = _FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger(_ROOT).addHandler(handler)

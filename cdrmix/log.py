"""Rank-aware logging: one message per run rather than one per rank. No torch. Rank 0 logs from
INFO; the other ranks log from WARNING, each line marked with the rank. Colours are for terminals.
"""

import contextlib
import logging
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import TextIO

from tqdm import tqdm
from tqdm.utils import disp_len

_ROOT = "cdrmix"
# tqdm's default lock is shared with forked processes: one that is killed while it writes would
# leave it locked for all others. A thread lock is enough: only threads share a terminal's bars.
tqdm.set_lock(threading.RLock())

# Codes of ANSI terminals (SGR) by style.
_STYLES = {"error": "1;31", "warning": "33", "ok": "32", "fail": "31", "bold": "1", "dim": "2"}
_RESET = "\x1b[0m"
_CODES = re.compile(r"\x1b\[[\d;]*m")
# A space at which a line may end: not one between a number and its unit.
_BREAK = re.compile(r" (?![KMGT]iB\b|%)")
# The word that opens a warning or error, behind the mark of the rank.
_OPENING = re.compile(r"(\[rank \d+\] )?(warning|error):")


def styled(text: str, style: str, stream: TextIO) -> str:
    """Returns `text` in a style, if it goes to a stream that shows colours, or else as it is.

    Styles: "error" (bold red), "warning" (yellow), "ok" (green), "fail" (red), "bold", "dim".
    Terminals show colours unless TERM is "dumb". A value of NO_COLOR turns them off everywhere, and
    otherwise one of FORCE_COLOR turns them on everywhere. Padding is added before: codes have no
    width. Raises KeyError for an unknown style.
    """
    code = _STYLES[style]
    is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"
    if os.environ.get("FORCE_COLOR"):
        is_shown = True
    if os.environ.get("NO_COLOR"):
        is_shown = False
    return f"\x1b[{code}m{text}{_RESET}" if is_shown and text else text


def columns(stream: TextIO) -> int | None:
    """Width of the terminal that a stream goes to (columns); None where it goes to no terminal.

    COLUMNS stands in for a terminal that does not tell its width, and 80 for both.
    """
    if not stream.isatty():
        return None
    return told_columns(stream) or shutil.get_terminal_size().columns


def told_columns(stream: TextIO) -> int | None:
    """Width that the terminal of a stream tells: 0 where nobody has set one, as in some containers;
    None where it cannot be asked."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None


def wrapped(line: str, *, width: int | None, hang: int = 0) -> list[str]:
    """Splits a line between words into lines of at most `width` columns; None: any width.

    Lines behind the first are indented by `hang`, at most by half of the width. A longer word
    stays whole. A style goes on from line to line, but not between them.
    """
    if width is None or visible_width(line) <= width:
        return [line]
    hang = min(hang, width // 2)
    lines = []
    first, *words = _BREAK.split(line)
    text = first
    for word in words:
        if visible_width(f"{text} {word}") > width and text.strip():
            style = _CODES.findall(text)[-1:]
            is_open = style not in ([], [_RESET])
            lines.append(text.rstrip() + _RESET * is_open)
            text = " " * hang + "".join(style) * is_open + word
        else:
            text += f" {word}"
    return [*lines, text.rstrip()]


def visible_width(text: str) -> int:
    """Columns that a text takes: none for codes of styles, two for a wide character."""
    return disp_len(text)


def get_logger(name: str) -> logging.Logger:
    """Logger below the root `cdrmix`, so that a user can silence or redirect all of them."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


class _ProgressAwareHandler(logging.Handler):
    """Writes to stderr, above a live progress bar instead of through it; on a terminal in colour,
    wrapped between words, and errors apart from the lines above."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_shown", False):
            return
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = _with_coloured_opening(line, is_error=record.levelno >= logging.ERROR)
        try:
            tqdm.write(_fitting(line), file=sys.stderr)
        except OSError:  # its reader is gone, such as a killed launcher: go on without
            self.handleError(record)


def _with_coloured_opening(line: str, *, is_error: bool) -> str:
    """Colours the word "warning:" or "error:" that opens a line, or else the whole line."""
    found = _OPENING.match(line)
    # The word decides, where there is one: some warnings tell of another process's error.
    style = found[2] if found else ("error" if is_error else "warning")
    start, end = (found.start(2), found.end()) if found else (0, len(line))
    coloured = line[:start] + styled(line[start:end], style, sys.stderr) + line[end:]
    return "\n" + coloured if is_error and sys.stderr.isatty() else coloured


def print_error(error: Exception) -> None:
    """Prints an error of the user's to stderr: on a terminal below a live bar, apart from it, and
    wrapped between words; elsewhere as it is."""
    tqdm.write(_fitting(_with_coloured_opening(f"error: {error}", is_error=True)), file=sys.stderr)


def _fitting(text: str) -> str:
    """Wraps text for the terminal of stderr, but not lines with flags: commands are copied."""
    width = columns(sys.stderr)
    lines = []
    for line in text.split("\n"):
        lines += [line] if " --" in line else wrapped(line, width=width, hang=2)
    return "\n".join(lines)


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


def log_shown(logger: logging.Logger, line: str) -> None:
    """Logs a line that stderr shows already, as it is or as a bar: it goes to files alone."""
    logger.info("%s", line, extra={"is_shown": True})


def log_to_file(path: Path) -> None:
    """Appends the log lines of this process to `path` too, with time and level."""
    handler = _FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger(_ROOT).addHandler(handler)

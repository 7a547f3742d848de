"""Records of a run's starts, RUN_DIR/starts/0001.json and on: one file each, never rewritten.

Rank 0 writes a start's record once its checkpoint is loaded, so that a refused start leaves none.
`starts.jsonl`, of `cdrmix launch` alone, tells the end of each start.
"""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cdrmix.cluster.handover import TRAIN
from cdrmix.config.redaction import REDACTED, SECRET_NAMES, redacted_text

STARTS_FOLDER = "starts"
BATCH_SCRIPT = "job.sbatch"  # of `cdrmix slurm`
_NAME = re.compile(r"\d{4,}\.json")
# Values of variables: --set launch.environment.TOKEN=abc, or 'launch={environment: {TOKEN: abc}}'.
# The flag may be shortened, and a key may have spaces around its parts.
_SECRET = re.compile(
    r"^((?:--s(?:et?)?=)?\s*launch\s*(?:\.\s*environment\s*(?:\.[^=]*)?)?)=.*", re.S
)
# Options of a class of a user's, with a name in them that is one of a secret: --set 'hooks=[...]'.
_OPTIONS = re.compile(rf"^([\w.=\s-]*?)=(?=.*options.*(?:{SECRET_NAMES})).*", re.S | re.I)
# Of a command that begins a run; the run directory holds what they said.
_BEGINS = ("--config", "--set", "--max-steps", "--run-dir", "--resume")


def read_start_records(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the records of all starts, in order; none of a run of an earlier version.

    Skips files that were not written whole, as on a full disk.
    """
    records = []
    for path in _files(run_dir):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and isinstance(record.get("number"), int):
                records.append(record)
    return records


def newest_start(run_dir: Path) -> dict[str, Any] | None:
    """Record of the newest start of a run; None of a run of an earlier version."""
    records = read_start_records(run_dir)
    return records[-1] if records else None


def _files(run_dir: Path) -> list[Path]:
    try:
        found = [each for each in (run_dir / STARTS_FOLDER).iterdir() if _NAME.fullmatch(each.name)]
    except OSError:
        return []
    return sorted(found, key=lambda each: int(each.stem))


def add_start_record(run_dir: Path, content: dict[str, Any]) -> int:
    """Writes the record of a start under the next number, which it returns.

    Raises OSError if it cannot be written, when nothing of it stays, or exists: another start would
    have taken the number.
    """
    files = _files(run_dir)
    number = int(files[-1].stem) + 1 if files else 1
    folder = run_dir / STARTS_FOLDER
    folder.mkdir(exist_ok=True)
    text = json.dumps({"number": number, **content}, indent=2) + "\n"
    path = folder / f"{number:04}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # such as a full disk, which leaves a part
        path.unlink(missing_ok=True)
        raise
    return number


def newest_number(run_dir: Path) -> int:
    """Number of the newest start of a run; 0 where none is on record."""
    return int((newest_start(run_dir) or {"number": 0})["number"])


def first_step(run_dir: Path, *, after: int, otherwise: int) -> int:
    """Step that the newest start began from, also by --resume PATH; `otherwise` if it left no
    record behind that of start `after`."""
    newest = newest_start(run_dir)
    return int(newest["from_step"]) if newest and newest["number"] > after else otherwise


def recorded_data(run_dir: Path, *, data_path: str | None = None) -> Path | None:
    """Folder of the data set that the newest start read; None of a run of an earlier version, or
    where that start had another `data_path` than the one given."""
    with contextlib.suppress(KeyError, TypeError):  # changed by hand
        record = newest_start(run_dir) or {}
        if data_path in (None, record["config"]["data"]["path"]):
            return Path(record["data"]["folder"])
    return None


def command_of_user(arguments: Sequence[str]) -> list[str]:
    """Words of the command that started this rank, without secrets.

    The furthest ancestor process that is `cdrmix launch` or `cdrmix train`, or that has the script
    among its words, such as deepspeed or torchrun. Where there is none on this host, as under srun
    and on other hosts of a hostfile, the script with its `arguments`.
    """
    own = [word for word in arguments if not word.startswith(("--local_rank", "--local-rank"))]
    words = ["python", str(TRAIN), *own]
    is_script = Path(sys.argv[0]).name == TRAIN.name
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents() if is_script else []:
            theirs = ancestor.cmdline()
            if ancestor.pid != 1 and (_is_launch(theirs) or sys.argv[0] in theirs):
                words = theirs
    return without_secrets(_shortened(words))


def _is_launch(words: Sequence[str]) -> bool:
    """True for `cdrmix launch` and `cdrmix train`, the program alone or behind its Python."""
    names = [Path(word).name for word in words[:3]]
    return any(names[n : n + 2] in (["cdrmix", "launch"], ["cdrmix", "train"]) for n in (0, 1))


def _shortened(words: Sequence[str]) -> list[str]:
    """Leaves out the Python that a program runs by, and the folders of programs."""
    if len(words) > 1 and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        is_program = os.access(words[1], os.X_OK) and not words[1].endswith(".py")
        if is_program:
            return [Path(words[1]).name, *words[2:]]
        return ["python", *words[1:]]
    return list(words)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Words of a command with the values of variables left out, options with secrets, and
    credentials of URLs."""
    safe = [_SECRET.sub(rf"\1={REDACTED}", word) for word in words]
    return [redacted_text(_OPTIONS.sub(rf"\1={REDACTED}", word)) for word in safe]


def command_to_go_on(words: Sequence[str], run_dir: Path) -> str:
    """Command of a shell that goes on with the run that `words` started, as it was started."""
    script = run_dir / BATCH_SCRIPT
    if "SLURM_JOB_ID" in os.environ and script.is_file():
        return shlex.join(["sbatch", str(script)])
    kept = []
    rest = iter(words)
    for word in rest:
        if word in _BEGINS:
            next(rest, None)  # its value
        elif word.partition("=")[0] not in _BEGINS:
            kept.append(word)
    return shlex.join([*kept, "--run-dir", str(run_dir), "--resume", "auto"])

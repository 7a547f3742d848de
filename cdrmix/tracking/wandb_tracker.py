"""W&B: a run for each start of ours, in one group; offline unless the configuration says online.

W&B cannot go on with an offline run, and drops what is logged at an earlier step. So each start,
and each return to an earlier step, begins a run of its own, and `step` is data: the axis of all.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from cdrmix.config.tracking import WandbOptions
from cdrmix.tracking.environment import keep_wandb_in
from cdrmix.tracking.tracker import Line, TrackedRun, Tracker

_MOST_LETTERS = 64  # of a run's id


class WandbTracker(Tracker):
    """Runs of W&B: one for each start, or one of all lines where `cdrmix track` makes it."""

    Options = WandbOptions

    def __init__(self, options: WandbOptions) -> None:
        self._options = options

    def open(self, run: TrackedRun) -> None:
        """Begins a run of W&B; nothing but sockets is written outside of the tracker's folder."""
        self._tracked = run
        keep_wandb_in(run.folder)
        self._temporary = run.folder / "tmp"
        self._temporary.mkdir(exist_ok=True)
        tempfile.tempdir = str(self._temporary)
        self._begin()

    def write(self, lines: Sequence[Line]) -> None:
        """Logs a row for each line."""
        for line in lines:
            self._run.log({**line.values, "_timestamp": line.time})

    def rewind(self, step: int) -> None:
        """Ends the run of W&B and begins another, which has only what counts from here on."""
        self._run.finish()
        self._begin()

    def close(self) -> None:
        """Ends the run, which online waits for the server."""
        self._run.finish()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _begin(self) -> None:
        import wandb

        tracked = self._tracked
        earlier = [
            *tracked.folder.glob("wandb/offline-run-*"),
            *tracked.folder.glob("wandb/run-*"),
        ]
        number = f"copy-{time.time_ns():x}" if tracked.is_copy else str(len(earlier) + 1)
        group = re.sub(r"[^\w-]", "-", tracked.name)[: _MOST_LETTERS - len(number) - 1]
        self._run: Any = wandb.init(
            project=self._options.project,
            entity=self._options.entity,
            id=f"{group}-{number}",
            name=f"{group}-{number}",
            group=group,
            dir=str(tracked.folder),
            config=dict(tracked.config),
            reinit="create_new",
            settings=_settings(self._options.mode, str(tracked.folder)),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")


def _settings(mode: str, folder: str) -> Any:
    """Settings with which W&B records what it is given, and nothing of the machine or the code."""
    import wandb

    return wandb.Settings(
        mode=mode,
        root_dir=folder,
        host="",
        program="cdrmix",
        console="off",
        silent=True,
        symlink=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )

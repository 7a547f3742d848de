"""Tiers of a run's checkpoints: its saver, and the newest good one of all tiers at a start."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from cdrmix import runtime
from cdrmix.checkpoint import folder, store
from cdrmix.checkpoint.archive import Archive, Uploads
from cdrmix.checkpoint.candidates import nothing_to_resume, step_folders, step_of
from cdrmix.checkpoint.files import damage, save_number
from cdrmix.checkpoint.host_saver import HostSaver
from cdrmix.checkpoint.host_tiers import HostTier, check_own, host_tiers, ranks_of_host
from cdrmix.checkpoint.joining import join_newest
from cdrmix.checkpoint.retention import configured_retention
from cdrmix.checkpoint.tiers import TieredSaver
from cdrmix.cluster.tier_leftovers import TIERS
from cdrmix.config.checkpoint import ArchiveTierConfig
from cdrmix.config.redaction import redacted_text
from cdrmix.config.schema import Config
from cdrmix.engines.archive_of_run import archive_of
from cdrmix.engines.run_directory import RunDirectory, last_saved_step
from cdrmix.errors import InfrastructureError, NoUsableStateError, StateError, TrainingError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic

if TYPE_CHECKING:
    from cdrmix.engines.run import Start

logger = get_logger(__name__)


def make_saver(start: Start, *, pinned: int | None) -> TieredSaver:
    """Returns the saver of a run's stage, to all tiers; collective."""
    config = start.config.checkpoint
    run_dir = start.directory.path
    background = start.plan.saves_in_background
    tiers = _kept(start, host_tiers(config, run_dir))
    hosts = HostSaver(tiers, run_dir, background=background) if tiers else None
    is_first = runtime.rank() == 0

    def uploads() -> Uploads | None:
        if tiers:
            write_json_atomic(run_dir / TIERS, {tier.name: str(tier.folder) for tier in tiers})
        archive = archive_of(start.config, run_dir)
        if archive is None or config.tiers is None or config.tiers.archive is None:
            return None
        settings = config.tiers.archive
        return Uploads(archive, every_steps=settings.every_steps, keep=settings.keep)

    def saved(step: int, path: Path) -> None:
        if saver.last is not None:  # on rank 0
            start.wall_time.saved(num_bytes=saver.last.bytes, seconds=saver.last.seconds)
        start.hooks.saved(step, path)

    saver = TieredSaver(
        start.directory.folders,
        hosts=hosts,
        uploads=runtime.together(lambda: uploads() if is_first else None),
        keep=config.keep,
        keep_best=config.keep_best,
        retention=runtime.together(lambda: configured_retention(config)),
        background=background,
        pinned=pinned,
        saved=saved,
    )
    return saver


def _kept(start: Start, tiers: Sequence[HostTier]) -> list[HostTier]:
    """Tiers that the plan has room for."""
    return [tier for tier in tiers if tier.name != "memory" or start.plan.has_memory_tier]


def find_in_tiers(directory: RunDirectory, config: Config) -> store.FoundCheckpoint | None:
    """Finds the newest good checkpoint of a run, in the nearest tier that has it; collective.

    What is lost or damaged in a tier is told and passed over. Raises as `store.find_newest`.
    """
    if config.checkpoint.tiers is None:
        return store.find_newest(directory.path, *directory.copies)
    tiers = host_tiers(config.checkpoint, directory.path)
    is_one_host = len(ranks_of_host()) == runtime.world_size()
    nearer: list[Path] = []
    if is_one_host:
        is_first = runtime.rank() == 0
        nearer = runtime.broadcast_object(_own_folders(tiers) if is_first else [])

    def find() -> tuple[store.FoundCheckpoint | None, NoUsableStateError | None]:
        try:
            return store.find_newest(directory.path, *directory.copies, nearer=nearer), None
        except NoUsableStateError as error:
            return None, error

    found, failure = find()
    number = -1 if found is None else save_number(found.path) or 0
    root = directory.folders[0]
    if tiers and not is_one_host and join_newest(tiers, root, newer_than=number):
        found, failure = find()
    if _may_be_behind(directory, found) and runtime.first_rank_does(
        lambda: _fetch_newer(directory, config, found)
    ):
        found, failure = find()
    if found is None and failure is not None:
        raise failure
    return found


def _own_folders(tiers: Sequence[HostTier]) -> list[Path]:
    """Folders of a run in the tiers of this host, without those that somebody else has made."""
    own = []
    for tier in tiers:
        try:
            check_own(tier.folder)
            own.append(tier.folder)
        except FileNotFoundError:
            logger.info("checkpoint.tiers.%s: has no checkpoint of this run", tier.name)
        except (OSError, StateError) as error:
            logger.warning("warning: checkpoint.tiers.%s: %s", tier.name, error)
    return own


def _may_be_behind(directory: RunDirectory, found: store.FoundCheckpoint | None) -> bool:
    """True if a checkpoint is newer than `found`, or was, and is not good; collective."""

    def is_behind() -> bool:
        if found is None or found.skipped:
            return True
        with contextlib.suppress(StateError):  # told where it counts
            return (last_saved_step(directory) or 0) > found.step
        return False

    return runtime.first_rank_does(is_behind)


def _fetch_newer(
    directory: RunDirectory, config: Config, found: store.FoundCheckpoint | None
) -> bool:
    """Copies the newest checkpoint of the archive into the run directory, if it was saved after
    `found`; rank 0. Returns True if there is one now."""
    number = -1 if found is None else save_number(found.path) or 0
    try:
        archive = archive_of(config, directory.path)
        numbers = archive.save_numbers() if archive is not None else {}
    except TrainingError as error:
        logger.warning("warning: checkpoint.tiers.archive: %s", error)
        return False
    assert archive is not None or not numbers
    for step, saved in numbers.items():
        if saved > number and archive is not None and fetched(archive, step, directory.folders[0]):
            return True
    return False


def fetched(archive: Archive, step: int, root: Path) -> bool:
    """Copies a checkpoint of an archive into a folder of checkpoints, where it gets its name last.
    Returns False, with a warning, if that fails."""
    temporary = root / f"{step}.tmp-{uuid4().hex[:8]}"
    try:
        folder.prepare(temporary, clears_leftovers=True)
        archive.fetch(step, temporary)
        if (root / str(step)).exists():  # damaged, or there would be nothing to fetch
            store.rename_aside(root / str(step))
        folder.publish(temporary, step)
    except (OSError, StateError, InfrastructureError) as error:
        logger.warning("warning: checkpoint.tiers.archive: %s", error)
        shutil.rmtree(temporary, ignore_errors=True)
        return False
    logger.info("fetched checkpoint %d of %s", step, archive.shown)
    return True


def clear_host_tiers(
    config: Config, directory: RunDirectory, start: store.FoundCheckpoint, *, newer: bool
) -> None:
    """Removes checkpoints in the tiers of hosts that were passed over for `start`, damaged or, with
    `newer`, of later steps: they are copies, and take memory; by the first rank of each host."""
    if runtime.rank() != ranks_of_host()[0]:
        return
    for tier in host_tiers(config.checkpoint, directory.path):
        with contextlib.suppress(OSError, StateError):
            check_own(tier.folder)
            for each in step_folders(tier.folder):
                if each in start.skipped_paths or (newer and step_of(each) > start.step):
                    folder.remove(each)


def is_on_hosts_alone(
    config: Config, directory: RunDirectory, start: store.FoundCheckpoint
) -> bool:
    """True if the checkpoint of a start is in a tier of hosts, and the run directory has none of
    that save; collective."""
    if start.path.parent not in [t.folder for t in host_tiers(config.checkpoint, directory.path)]:
        return False
    own = directory.folders[0] / str(start.step)

    def lacks() -> bool:
        return save_number(own) != save_number(start.path) or bool(damage(own, with_digests=False))

    return runtime.first_rank_does(lacks)


def fetch_resumed(resume: str, directory: RunDirectory, config: Config) -> None:
    """Copies the checkpoint that --resume URL names, or the last one saved there, into the run
    directory; rank 0. Raises StateError if there is none, InfrastructureError if the store does not
    answer."""
    place, _, name = resume.rstrip("/").rpartition("/")
    is_step = name.isdecimal()
    tiers = config.checkpoint.tiers
    configured = None if tiers is None else tiers.archive
    settings = configured or ArchiveTierConfig(path=resume)
    archive = Archive(place if is_step else resume, answer_seconds=settings.answer_seconds)
    steps = [int(name)] if is_step else list(archive.save_numbers())
    if not any(fetched(archive, step, directory.folders[0]) for step in steps):
        raise nothing_to_resume(redacted_text(resume))

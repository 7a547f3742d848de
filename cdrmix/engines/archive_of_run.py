"""Archive that a run is configured with, and its check before a start. No torch."""

from __future__ import annotations

from pathlib import Path

from cdrmix.checkpoint.archive import Archive
from cdrmix.config.resuming import resumed_run
from cdrmix.config.schema import Config
from cdrmix.errors import InfrastructureError, StateError
from cdrmix.log import get_logger

logger = get_logger(__name__)


def archive_of(config: Config, run_dir: Path) -> Archive | None:
    """Archive of a run, by the name of its directory; None if none is configured."""
    if config.checkpoint.tiers is None or config.checkpoint.tiers.archive is None:
        return None
    settings = config.checkpoint.tiers.archive
    place = f"{settings.path.rstrip('/')}/{run_dir.resolve().name}"
    return Archive(place, answer_seconds=settings.answer_seconds)


def check_archive(config: Config, run_dir: Path, *, resume: str) -> None:
    """Refuses an archive that cannot be used, before a model is built; on one rank.

    Raises:
        ConfigError: if it cannot be written, as with a wrong URL or without rights.
        StateError: if a new run would write over checkpoints of another one.
        InfrastructureError: of a new run, if the store does not answer; a run that goes on warns.
    """
    archive = archive_of(config, run_dir)
    if archive is None:
        return
    try:
        archive.check_writable()
        steps = archive.steps() if resume != "auto" else []
    except InfrastructureError as error:
        if resume == "never":
            raise
        logger.warning("warning: checkpoint.tiers.archive: %s", error)
        return
    if steps and not _is_within(resume, archive):
        raise StateError(
            f"checkpoint.tiers.archive: {archive.shown} has checkpoints of an earlier run, which "
            "are never overwritten. Give --resume auto to go on from them, or another --run-dir"
        )


def _is_within(resume: str, archive: Archive) -> bool:
    """True if --resume names the archive of the run itself, or a run directory of its name."""
    is_ours = resume.rstrip("/").startswith(archive.url)
    run = resumed_run(resume)
    return is_ours or (run is not None and run.resolve().name == Path(archive.url).name)


def is_url(resume: str) -> bool:
    """True if --resume names an archive."""
    return "://" in resume

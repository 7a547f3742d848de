"""Checks of a start before it is made: no rank, no process group and no torch.

The ranks check again what can change until they have met, and verify every file; here a mistake is
told in a second, on a login node too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdrmix.checkpoint.candidates import (
    all_damaged,
    candidates,
    check_same_model,
    nothing_to_resume,
)
from cdrmix.checkpoint.files import damage, read_json
from cdrmix.checkpoint.retention import configured_retention
from cdrmix.config.base_checks import check_base
from cdrmix.config.cpt import SELF, CptConfig
from cdrmix.config.load import SAMPLE
from cdrmix.config.redaction import redacted_text
from cdrmix.config.schema import Config
from cdrmix.data.mixture import MixedDataset, built_mixture
from cdrmix.data.replay import check_tokenizers, open_old
from cdrmix.data.sample import sample_folder
from cdrmix.data.shards import Manifest, check_vocab, read_manifest, tokenizer_problems
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.data.tokenizer_files import check_tokenizer
from cdrmix.engines import start_point
from cdrmix.engines.run_directory import not_writable, place_of_run
from cdrmix.errors import (
    ConfigError,
    DataError,
    InfrastructureError,
    PlanError,
    StateError,
    TrainingError,
)
from cdrmix.evaluation.suite import request_in_training, suite_of
from cdrmix.export.manifest import verify_export
from cdrmix.hooks.source import check_sources
from cdrmix.planning.profile import check_legal
from cdrmix.tracking.choice import check_trackers

# A second's worth of reading: the weights of a small model, not those of a large one.
_DIGESTED_BYTES = 2**28
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s]+")


def check_start(
    config: Config,
    *,
    world_size: int,
    profile: str | None,
    device: str | None,
    run_dir: Path | None,
    resume: str,
) -> None:
    """Refuses a start that cannot become a run, with all reasons, one to a line.

    Args:
        config: of the start, resolved.
        world_size: number of ranks.
        profile: --profile, name or path; None: chosen.
        device: "cpu" or "cuda"; None: rules about it are left out.
        run_dir: --run-dir; None: a new one.
        resume: --resume: never, auto, or a run directory or checkpoint.
    Raises:
        PlanError: if layout and profile are impossible on these ranks.
        DataError: if the data set is missing, or does not fit model, mixture or sequence length;
            if the weights of a Hugging Face model, or tasks of a suite, are missing or damaged.
        StateError: if there is nothing to resume, or the run directory cannot be used.
        ConfigError: if Stage B is given no Stage A, a hook or rule of retention is missing, the
            folder of a Hugging Face model cannot be used, or a tracker is not installed.
        InfrastructureError: if a file system does not answer for now.
    """
    found: list[TrainingError] = []
    with _noted(found):
        check_legal(config, world_size=world_size, profile=profile, device=device)
    with _noted(found):
        check_sources(config.hooks)
    with _noted(found):
        configured_retention(config.checkpoint)
        _check_profile(config, world_size=world_size)
    found += [*_data_problems(config), *_suite_problems(config)]
    with _noted(found):
        _check_task_file(config)
    if config.cpt is not None:
        found += _old_data_problems(config, config.cpt)
    with _noted(found):
        check_trackers(
            config.monitoring.trackers or (),
            run_dir or Path("experiments"),
            environment=config.launch.environment,
        )
    with _noted(found):
        _check_base(config, run_dir=run_dir, resume=resume)
    with _noted(found):
        _check_backbone(config, run_dir=run_dir, resume=resume)
    # Stage B alone may be told to take its backbone from the same place.
    if not any(isinstance(each, StateError) for each in found):
        with _noted(found):
            _check_resumed(config, run_dir=run_dir, resume=resume)
    with _noted(found):
        _check_run_dir(config, run_dir=run_dir, resume=resume)
    with _noted(found):
        _check_start_from(config, run_dir=run_dir, resume=resume)
    if found:
        # A mistake counts more than a passing fault, which the same command may not meet again.
        gravest = min(found, key=lambda each: each.exit_code)
        raise type(gravest)("\n".join(dict.fromkeys(str(each) for each in found)))


def _check_profile(config: Config, *, world_size: int) -> None:
    if config.profile is None:
        return
    first, last = config.profile.steps
    steps = config.training.num_steps
    if config.training.stage == "a" and first > steps:
        raise PlanError(
            f"profile.steps = [{first}, {last}]: the run ends after step {steps}. Try steps up to "
            "it, or profile=null"
        )
    missing = [rank for rank in config.profile.ranks if rank >= world_size]
    if missing:
        raise PlanError(
            f"profile.ranks = {[*config.profile.ranks]}: this run has {world_size} "
            f"rank{'s' * (world_size > 1)}, counted from 0. Leave out "
            f"{', '.join(map(str, missing))}"
        )


@contextlib.contextmanager
def _noted(found: list[TrainingError]) -> Iterator[None]:
    try:
        yield
    except TrainingError as error:
        found.append(error)


def _data_problems(config: Config) -> list[TrainingError]:
    """Faults of the data set, by its manifest and tokenizer; shards are verified by the ranks."""
    path = config.data.path
    if "://" in path:
        # Looked at by the ranks, which copy it: a store may take a minute to answer.
        if _URL.fullmatch(path):
            return []
        return [
            DataError(
                f"data.path = {redacted_text(path)}: not a URL. Give SCHEME://PLACE, such as "
                "https://host/folder, or a folder of token shards"
            )
        ]
    folder = Path(path)
    base = Path(config.model.path) if config.model.path is not None else None
    if path == SAMPLE and base is not None:
        return [
            DataError(
                "data.path = sample: is built with a tokenizer of its own, and not with that of "
                f"{base}. Build a data set with tokenizer.path: {base} in its recipe (cdrmix data "
                "build)"
            )
        ]
    if path == SAMPLE:
        folder = sample_folder(config.model.vocab_size)
        if not folder.exists():  # the first run builds it
            return []
    found: list[TrainingError] = []
    with _noted(found):
        manifest = read_manifest(folder, recipe=config.data.recipe)
        with _noted(found):
            check_vocab(manifest, config.model.vocab_size)
        if base is not None and base.is_dir():
            with _noted(found):
                check_tokenizer(manifest, base)
        for problem in tokenizer_problems(folder, manifest):
            found.append(DataError(f"{problem.text} {problem.advice}".rstrip()))
        for open_split in (_open_train, _open_validation):
            with _noted(found):
                open_split(folder, manifest, config)
    return found


def _old_data_problems(config: Config, cpt: CptConfig) -> list[TrainingError]:
    """Faults of the old data of continual pre-training, by their manifests."""
    found: list[TrainingError] = []
    new = None
    folder = Path(config.data.path)
    if config.data.path == SAMPLE:
        folder = sample_folder(config.model.vocab_size)
    with contextlib.suppress(DataError):  # told of data.path, or to be built or copied by the ranks
        new = read_manifest(folder) if "://" not in config.data.path else None
    length = config.training.sequence_length
    old = {"cpt.forgetting.data": cpt.forgetting.data or ()}
    if cpt.replay is not None and cpt.replay.source != SELF:
        old["cpt.replay.source"] = (cpt.replay.source,)
    for key, folders in old.items():
        for name in folders:
            each = Path(name)
            with _noted(found):
                manifest = read_manifest(each, given_as=key)
                if new is not None:
                    check_tokenizers(new, manifest, data=config.data, key=key, folder=each)
                if key == "cpt.replay.source" and cpt.replays:
                    open_old(each, length, key=key)
                if name in cpt.old_data:
                    TokenDataset(each, "validation", length)
    return found


def _check_task_file(config: Config) -> None:
    """Refuses a file of tasks of the user's with a row that Stage B cannot use."""
    if config.stage_b is None or config.training.stage == "a":
        return
    # here, as a run of Stage A alone imports nothing of Stage B
    from cdrmix.reasoning.own_tasks import read_own_tasks

    training = config.stage_b.training
    is_sample = config.data.path == SAMPLE
    folder = sample_folder(config.model.vocab_size) if is_sample else Path(config.data.path)
    encode = None
    # Without a tokenizer yet, rows are measured by the ranks, which make or copy the data set.
    if training.task_file is not None and "://" not in config.data.path and folder.is_dir():
        with contextlib.suppress(DataError):  # told by `_data_problems`
            encode = load_tokenizer(folder).encode
    window_tokens = training.window_tokens or config.training.sequence_length
    read_own_tasks(training, window_tokens=window_tokens, encode=encode)


def _suite_problems(config: Config) -> list[TrainingError]:
    """Faults of what the run's suites read, such as files of tasks: else a suite at the end would
    be missed after days."""
    settings = config.evaluation
    refused = {"reasoning"} if settings.execute_code else {"reasoning", "code"}  # by rules
    found: list[TrainingError] = []
    for suite in settings.suites:
        if suite.name not in refused:
            with _noted(found):
                asked = suite_of(suite.name, where="evaluation.suites")
                known: dict[str, str] = getattr(asked, "options", {})
                if unknown := sorted(suite.options.keys() - known.keys()):
                    raise ConfigError(
                        f"evaluation.suites, {suite.name}: it has no options {', '.join(unknown)}. "
                        f"Known: {', '.join(known) or 'none'}"
                    )
                asked.check(request_in_training(settings, suite))
    return found


def _check_base(config: Config, *, run_dir: Path | None, resume: str) -> None:
    """Refuses the folder of a Hugging Face model that a start reads, by headers and sizes.

    A checkpoint holds all weights of a model that is trained whole: its base may be gone.
    """
    place = run_dir if resume == "auto" else None if resume == "never" else Path(resume)
    goes_on = place is not None and bool(candidates(place))
    if config.model.kind == "hf" and not (goes_on and config.model.lora is None):
        check_base(config.model)


def _open_train(folder: Path, manifest: Manifest, config: Config) -> None:
    mixture = config.data.mixture or built_mixture(manifest)
    length = config.training.sequence_length
    if mixture is None:
        TokenDataset(folder, "train", length)
    else:
        MixedDataset(folder, "train", length, mixture)


def _open_validation(folder: Path, manifest: Manifest, config: Config) -> None:
    TokenDataset(folder, "validation", config.training.sequence_length)


def _check_start_from(config: Config, *, run_dir: Path | None, resume: str) -> None:
    """Refuses weights to start from that are not there, not whole or do not fit; the ranks verify
    the digests of large files."""
    if config.training.start_from is None:
        return
    resumed = run_dir if resume == "auto" else None if resume == "never" else Path(resume)
    if resumed is not None and candidates(resumed):
        return  # they are not read any more
    if resume == "auto" and _has_copies(config) and run_dir and run_dir.exists():
        return
    place = Path(config.training.start_from)
    if start_point.kind_of(place) == "export":
        verify_export(place, max_digested_bytes=_DIGESTED_BYTES)
        point = start_point.of_export(place)
    else:
        skipped = []
        whole = None
        for folder in candidates(place):
            if not (reasons := damage(folder, with_digests=False)):
                whole = folder
                break
            skipped.append((folder.name, "; ".join(reasons)))
        if whole is None:
            why = "; ".join(f"{name}: {reasons}" for name, reasons in skipped)
            raise start_point.all_damaged(place, why)
        point = start_point.of_checkpoint(whole)
    data = None
    if "://" not in config.data.path:
        is_sample = config.data.path == SAMPLE
        folder = sample_folder(config.model.vocab_size) if is_sample else Path(config.data.path)
        with contextlib.suppress(DataError):  # told by `_data_problems`
            data = read_manifest(folder)
    start_point.check_fits(point, config.model, data=data)


def _check_resumed(config: Config, *, run_dir: Path | None, resume: str) -> None:
    """Refuses to resume where no checkpoint is whole, or of another model; not by digests."""
    if resume == "never" or (resume == "auto" and run_dir is None):  # told by `_check_run_dir`
        return
    if "://" in resume:  # looked at by the ranks, as a store may take a minute to answer
        return
    place = Path(resume) if run_dir is None or resume != "auto" else run_dir
    folders = candidates(place)
    if not folders and resume != "auto":
        raise nothing_to_resume(resume)
    skipped = []
    for folder in folders:
        reasons = damage(folder, with_digests=False)
        if not reasons:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                check_same_model(folder, read_json(folder / "state.json")["config"], config)
            return
        skipped.append((folder.name, "; ".join(reasons)))
    if skipped and not (resume == "auto" and _has_copies(config)):
        raise all_damaged(place, skipped)


def _has_copies(config: Config) -> bool:
    """True if the ranks look for checkpoints elsewhere too."""
    return config.checkpoint.replica is not None or config.checkpoint.tiers is not None


def _check_run_dir(config: Config, *, run_dir: Path | None, resume: str) -> None:
    """Refuses a run directory that exists and is not resumed, or that cannot be made."""
    path = run_dir or Path("experiments")
    try:
        path, _ = place_of_run(config, requested=run_dir, resume=resume)
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise not_writable(path, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
            raise not_writable(path, os.strerror(errno.EROFS if is_read_only else errno.EACCES))
    except OSError as error:
        raise not_writable(path, error.strerror) from error


def _check_backbone(config: Config, *, run_dir: Path | None, resume: str) -> None:
    """Refuses a Stage B alone without a Stage A.

    Raises:
        ConfigError: if neither configuration nor command line names the backbone's run.
        StateError: if there is no checkpoint in it.
    """
    if config.training.stage != "b":
        return
    assert config.stage_b is not None, "checked at construction"
    resumed = run_dir if resume == "auto" else None if resume == "never" else Path(resume)
    # Unverified states will do: ranks verify the checkpoint itself once they have started.
    if resumed is not None and any(map(_is_of_stage_b, candidates(resumed))):
        return  # it holds the backbone, too
    if config.stage_b.run is not None:
        place = Path(config.stage_b.run)
        option = f"stage_b.run = {config.stage_b.run}"
    elif resume not in ("never", "auto"):
        place = Path(resume)
        option = f"--resume {resume}"
    elif resume == "auto" and run_dir is not None:
        place = run_dir
        option = f"--run-dir {run_dir} --resume auto"
    else:
        raise ConfigError(
            "training.stage = b: Stage B starts from a finished Stage A. Try --set "
            "stage_b.run=RUN_DIR, --run-dir RUN_DIR --resume auto to go on in its run directory, "
            "or training.stage = all"
        )
    if "://" not in option and not candidates(place):
        raise StateError(
            f"{option}: holds no checkpoint to take the backbone from. Give the run directory of a "
            "finished Stage A, or training.stage = all"
        )


def _is_of_stage_b(checkpoint: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, InfrastructureError):
        state: Any = read_json(checkpoint / "state.json")
        return isinstance(state, dict) and state.get("stage") == "b"
    return False

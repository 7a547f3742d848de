"""From a recipe to a folder of token shards, by processes of this machine or of many.

Work in progress lies in `<out>/work`: a folder per task and stage, named by what it follows from.
What is there is done and is not done again, after a kill as after a change of later steps. The
manifest, written last, makes the result whole and ends the work folder. The result depends on the
sources and the recipe, not on what runs the jobs, or how many at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cdrmix import log
from cdrmix.config.load import config_hash
from cdrmix.corpus.encode import (
    SPLITS,
    EncodeJob,
    StreamJob,
    read_ngrams,
    read_stream,
    run_encode,
    split_of,
    write_stream,
)
from cdrmix.corpus.inspection import lineage, read_report, write_build_report
from cdrmix.corpus.recipe import (
    Recipe,
    StepConfig,
    identity,
    is_corpus_step,
    load_recipe,
    make_step,
)
from cdrmix.corpus.remote_jobs import Engine, Pool
from cdrmix.corpus.stage import (
    StageJob,
    leave_out_last,
    notes_path,
    read_documents,
    read_record,
    run_stage,
)
from cdrmix.corpus.steps.filter import Filter
from cdrmix.corpus.tasks_of_sources import content_key, make_tasks
from cdrmix.data.document import draw_by_key
from cdrmix.data.folders import locked, new_folder
from cdrmix.data.shards import (
    MANIFEST_FILE,
    SHARD_SUFFIXES,
    Dtype,
    Manifest,
    TokenizerInfo,
    new_manifest,
    read_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
)
from cdrmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_tokenizer
from cdrmix.errors import DataError

DEFAULT_VOCAB_SIZE = 50_272
EngineName = Literal["local", "slurm", "ray"]
_logger = log.get_logger(__name__)
# A step and its place in the recipe.
Numbered = tuple[int, StepConfig]


def build_dataset(
    recipe_file: Path,
    out: Path,
    *,
    workers: int,
    engine: EngineName | Engine = "local",
    sbatch: Mapping[str, str] | None = None,
    task_bytes: int | None = None,
) -> Manifest:
    """Build a recipe's token shards into `out`, or go on with a build that was interrupted.

    Args:
        recipe_file: YAML of the recipe.
        workers: processes; 1 works in this one. With another engine, most jobs at a time.
        engine: what runs the jobs: processes of this machine, SLURM, Ray, or one of your own.
        sbatch: options of sbatch, for SLURM.
        task_bytes: files are put together into tasks up to this size; None: by the size of the
            corpus.
    Raises:
        ConfigError: if the recipe is wrong.
        DataError: if a source cannot be used, nothing is left of the corpus, `out` is something
            else or in use, or it cannot be written.
    """
    recipe = load_recipe(recipe_file)
    if workers < 1:
        raise DataError(f"--workers {workers}: at least 1 is needed")
    if out.exists() and not _can_hold_build(out):
        raise DataError(f"{out}: exists and is not the folder of a data build. Give another --out.")
    if link := next(_links_below(out), None):
        raise DataError(
            f"{link}: is a symbolic link, which a build never makes; it would write where that "
            "leads. Remove it, or give another --out."
        )
    _check_early(recipe)
    try:
        with locked(out / ".lock", blocking=False) as held:
            if not held:
                raise DataError(
                    f"{out}: another build is writing there. Wait for it, or give another --out."
                )
            if isinstance(engine, str):
                engine = _engine(engine, workers, out / "work", sbatch or {})
            with engine as pool:
                return _Build(recipe, recipe_file.stem, out, pool, task_bytes).run()
    except OSError as error:
        raise DataError(
            f"{error.filename or out}: {error.strerror}. What is done stays in {out}: mend this "
            "and start again, to go on from there."
        ) from error


def _check_early(recipe: Recipe) -> None:
    """Tell now what would otherwise be told hours later.

    Raises:
        DataError: if the tokenizer that is named cannot be used, or a step has no way with a
            domain.
    """
    if recipe.tokenizer.path is not None:
        load_tokenizer(Path(recipe.tokenizer.path))
    domains = {source.domain for source in recipe.sources}
    for config in recipe.steps:
        if config.name == Filter.name:
            make_step(config).check_domains(sorted(filter(config.takes, domains)))


def _engine(name: EngineName, workers: int, work: Path, sbatch: Mapping[str, str]) -> Engine:
    """What runs the jobs of a build.

    Raises:
        DataError: if it is not installed here.
    """
    if sbatch and name != "slurm":
        raise DataError(f"--sbatch {', '.join(sbatch)}: is for --engine slurm")
    try:
        if name == "slurm":
            from cdrmix.corpus.slurm_jobs import SlurmEngine

            return SlurmEngine(work / "slurm", max_tasks=workers, sbatch=sbatch)
        if name == "ray":
            from cdrmix.corpus.ray_jobs import RayEngine

            return RayEngine(max_tasks=workers)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise DataError(
            f"--engine {name} needs the package '{package}': pip install 'cdrmix[{name}]'"
        ) from None
    return Pool(workers)


def _can_hold_build(out: Path) -> bool:
    return out.is_dir() and ((out / ".lock").exists() or not any(out.iterdir()))


def _links_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        paths = (Path(parent, name) for name in (*folders, *files))
        yield from (path for path in paths if path.is_symlink())


@dataclass(frozen=True)
class _Stage:
    """Steps that a task takes in one go: the end of a step over the corpus, ordinary steps, and
    the beginning of the next step over the corpus."""

    decided_by: Numbered | None
    steps: tuple[Numbered, ...]
    notes_of: Numbered | None


@dataclass(frozen=True)
class _Tokenizer:
    """The tokenizer of a build: its folder, the slots asked for, and what it has."""

    folder: Path
    vocab_size: int
    num_tokens: int
    eos_id: int

    @property
    def dtype(self) -> Dtype:
        return smallest_dtype(self.vocab_size)


def _stages(recipe: Recipe) -> Iterator[_Stage]:
    """The recipe's steps, cut where one looks at the whole corpus."""
    decided_by: Numbered | None = None
    steps: list[Numbered] = []
    for numbered in enumerate(recipe.steps):
        if is_corpus_step(numbered[1]):
            yield _Stage(decided_by, tuple(steps), numbered)
            decided_by = numbered
            steps = []
        else:
            steps.append(numbered)
    yield _Stage(decided_by, tuple(steps), None)


class _Build:
    """One build, under its lock."""

    def __init__(
        self, recipe: Recipe, name: str, out: Path, pool: Engine, task_bytes: int | None
    ) -> None:
        self._recipe = recipe
        self._out = out
        self._pool = pool
        self._name = name
        self._work = out / "work"
        self._tasks, self._found = make_tasks(recipe, out=out, task_bytes=task_bytes)
        self._share = recipe.shards.validation_share
        self._key = content_key(
            config_hash(recipe),
            [task.key for task in self._tasks],
            [identity(step) for step in recipe.steps],
        )
        self._decisions: dict[int, Any] = {}  # what steps over the corpus found, by number

    def run(self) -> Manifest:
        """Go through all phases, each of which takes up what is there."""
        if (self._out / MANIFEST_FILE).exists():
            return self._finished()
        for leftover in self._work.glob("*/.*.building-*"):
            shutil.rmtree(leftover)
        _logger.info(
            "data build: %d tasks from %d sources", len(self._tasks), len(self._recipe.sources)
        )
        parts = self._run_stages()
        self._check_not_empty(parts)
        tokenizer = self._tokenizer(parts[-1])
        streams = self._write_shards(parts[-1], tokenizer)
        return self._finish(parts, tokenizer, streams)

    def _finished(self) -> Manifest:
        """The manifest of a build that is done.

        Raises:
            DataError: if it is of another recipe or other sources.
        """
        if read_report(self._out).get("key") != self._key:
            raise DataError(
                f"{self._out}: holds a finished data set of another recipe, or of sources that "
                "have changed since. Give another --out, or delete it."
            )
        shutil.rmtree(self._work, ignore_errors=True)
        _logger.info("data build: %s is finished already", self._out)
        return read_manifest(self._out)

    def _run_stages(self) -> list[list[Path]]:
        """The results of each stage, by task in corpus order."""
        parts: list[list[Path]] = []
        decided: list[Path | None] = [None] * len(self._tasks)
        for number, stage in enumerate(_stages(self._recipe)):
            jobs = [
                self._stage_job(number, stage, place, parts[-1][place] if parts else None, decision)
                for place, decision in enumerate(decided)
            ]
            self._pool.run_all(run_stage, jobs, what=f"stage {number + 1}", blame=leave_out_last)
            parts.append([job.out for job in jobs])
            if stage.notes_of is not None:
                decided = self._decide(stage.notes_of, jobs)
        return parts

    def _stage_job(
        self, number: int, stage: _Stage, place: int, before: Path | None, decision: Path | None
    ) -> StageJob:
        task = self._tasks[place]
        domain = task.source.domain
        steps = tuple(numbered for numbered in stage.steps if numbered[1].takes(domain))
        notes_of = None
        if stage.notes_of is not None and stage.notes_of[1].takes(domain):
            notes_of = stage.notes_of[1]
        key = content_key(
            before.name if before else task.key,
            hashlib.sha256(decision.read_bytes()).hexdigest() if decision else None,
            [(step_number, identity(step)) for step_number, step in steps],
            identity(notes_of) if notes_of else None,
            self._recipe.keep_dropped,
        )
        return StageJob(
            task=task,
            before=before,
            decision=(*stage.decided_by, decision) if stage.decided_by and decision else None,
            steps=steps,
            notes_of=notes_of,
            out=self._work / f"stage-{number}" / key,
            keep_dropped=self._recipe.keep_dropped,
        )

    def _decide(self, numbered: Numbered, jobs: Sequence[StageJob]) -> list[Path | None]:
        """The decision of a step over the corpus on each task that takes it."""
        number, config = numbered
        step = make_step(config)
        notes = {i: notes_path(job.out) for i, job in enumerate(jobs) if job.notes_of}
        names = [path.name for path in notes.values()]
        out = self._work / f"decision-{number}" / content_key(names)
        if not out.is_dir():
            _logger.info("data build: %s over %d tasks", config.name, len(notes))
            with new_folder(out) as folder:
                found = step.decide(list(notes.values()), folder)
                write_file(folder / "found.json", json.dumps(found).encode())
        self._decisions[number] = json.loads((out / "found.json").read_bytes())
        return [step.decision(notes[i], out) if i in notes else None for i in range(len(jobs))]

    def _check_not_empty(self, parts: list[list[Path]]) -> None:
        if any(read_record(part)["documents"] for part in parts[-1]):
            return
        records = [read_record(part) for stage in parts for part in stage]
        reasons = sorted({reason for record in records for reason in _reasons(record)})
        raise DataError(
            f"{self._out}: no document is left of the corpus. Reasons: {', '.join(reasons[:10])}. "
            "Look at the steps of the recipe, and at the domains that they are for."
        )

    def _tokenizer(self, parts: list[Path]) -> _Tokenizer:
        """The tokenizer that the recipe names, or one trained on the corpus."""
        config = self._recipe.tokenizer
        key = content_key([part.name for part in parts], config.model_dump(), self._share)
        folder = self._work / "tokenizer" / key
        if config.path is not None:
            folder = Path(config.path)
        elif not folder.is_dir():
            vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
            _logger.info("data build: training a tokenizer of %d tokens", vocab_size)
            trained = train_tokenizer(self._training_texts(parts), vocab_size)
            with new_folder(folder) as new:
                write_file(new / TOKENIZER_FILE, trained.to_str(pretty=True).encode())
        loaded = load_tokenizer(folder)
        vocab_size = loaded.vocab_size if config.path else config.vocab_size or DEFAULT_VOCAB_SIZE
        return _Tokenizer(folder, vocab_size, loaded.vocab_size, loaded.eos_id)

    def _training_texts(self, parts: list[Path]) -> Iterator[str]:
        """Texts of the training split; a share of them by hash where there are more than asked."""
        num_bytes = sum(read_record(part)["text_bytes"] for part in parts)
        share = self._recipe.tokenizer.training_bytes / max(1, num_bytes)
        for task, part in zip(self._tasks, parts, strict=True):
            for document in read_documents(part, task):
                in_training = split_of(document.id, self._share) == "train"
                if in_training and draw_by_key(document.id, "tokenizer") < share:
                    yield document.text

    def _write_shards(self, parts: list[Path], tokenizer: _Tokenizer) -> list[StreamJob]:
        """The finished jobs, one for each split and domain."""
        digest = hashlib.sha256((tokenizer.folder / TOKENIZER_FILE).read_bytes()).hexdigest()
        fim = self._recipe.fim and self._recipe.fim.model_dump()
        jobs = [
            EncodeJob(
                task=task,
                documents=part,
                tokenizer=tokenizer.folder,
                dtype=tokenizer.dtype,
                validation_share=self._share,
                fim=self._recipe.fim,
                out=self._work / "tokens" / content_key(part.name, digest, self._share, fim),
            )
            for task, part in zip(self._tasks, parts, strict=True)
        ]
        self._pool.run_all(run_encode, jobs, what="encode")
        # Shards are written in place: their results go first, lest one speak for a shard half made.
        shards = (path for suffix in SHARD_SUFFIXES for path in self._out.glob(f"*.{suffix}"))
        for leftover in (*self._work.glob("*.json"), *shards):
            leftover.unlink()
        streams = [
            self._stream_job(split, domain, jobs, tokenizer.eos_id)
            for split in SPLITS
            for domain in sorted({task.source.domain for task in self._tasks})
        ]
        self._pool.run_all(write_stream, streams, what="shards")
        return streams

    def _stream_job(
        self, split: str, domain: str, jobs: Sequence[EncodeJob], eos_id: int
    ) -> StreamJob:
        return StreamJob(
            parts=tuple(
                (job.task.source.name, job.out) for job in jobs if job.task.source.domain == domain
            ),
            split=split,
            domain=domain,
            dtype=jobs[0].dtype,
            eos_id=eos_id,
            max_tokens=self._recipe.shards.max_tokens,
            out=self._out,
            result=self._work / f"{split}-{domain}.json",
        )

    def _finish(
        self, parts: list[list[Path]], tokenizer: _Tokenizer, streams: list[StreamJob]
    ) -> Manifest:
        """Write tokenizer, report and, last, the manifest; the work folder is of no more use."""
        content = (tokenizer.folder / TOKENIZER_FILE).read_bytes()
        file = write_file(self._out / TOKENIZER_FILE, content)
        records = [read_record(part) for part in parts[-1]]
        shards = [shard for stream in streams for shard in read_stream(stream)]
        manifest = new_manifest(
            [shard for shard, _ in shards],
            vocab_size=tokenizer.vocab_size,
            tokenizer=TokenizerInfo(
                file=TOKENIZER_FILE, sha256=file.sha256, num_tokens=tokenizer.num_tokens
            ),
            eos_id=tokenizer.eos_id,
            source=lineage(self._recipe, self._name, self._tasks, records, shards),
        )
        write_build_report(
            self._out,
            key=self._key,
            recipe=self._recipe,
            listings=self._found,
            results=list(zip(self._tasks, *parts, strict=True)),
            decisions=self._decisions,
            ngrams={s.domain: read_ngrams(s) for s in streams if s.split == SPLITS[0]},
        )
        write_manifest(self._out, manifest)
        shutil.rmtree(self._work)
        self._log_result(manifest)
        return manifest

    def _log_result(self, manifest: Manifest) -> None:
        tokens = ", ".join(f"{info.tokens:,} {split}" for split, info in manifest.splits.items())
        _logger.info("data build: %s; tokens: %s", self._out, tokens)
        left = {shard.domain for shard in manifest.shards if shard.split == SPLITS[0]}
        for domain in sorted({source.domain for source in self._recipe.sources} - left):
            _logger.warning("data build: no document of domain %s is left to train on", domain)
        if "validation" not in manifest.splits:
            _logger.warning(
                "data build: no document was held out, so training on this cannot evaluate; "
                "raise shards.validation_share above %g",
                self._share,
            )


def _reasons(record: dict[str, Any]) -> Iterator[str]:
    for step in record["steps"]:
        yield from (f"{step['name']}: {reason}" for reason in step["dropped"])
    yield from (f"read: {entry['reason']}" for entry in record["set_aside"])

"""Builds a folder of token shards from a recipe, in processes of one machine or of many.

`<out>/work` holds the work in progress: one folder per task and pass, named by a hash of all its
inputs. A folder that exists is complete and is not built again, neither after a kill nor after a
change of later steps. The manifest is written last; then the work folder is removed. The result
depends on the sources and the recipe only, not on the engine or the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix import log
from cdrmix.config.load import config_hash
from cdrmix.config.plugin import plugins_of
from cdrmix.corpus.encode import (
    SPLITS,
    EncodeJob,
    StreamJob,
    encoded_tokens,
    fim_counts,
    run_encode,
    split_of,
    split_sizes,
    write_stream,
)
from cdrmix.corpus.inspection import BuildOutcome, lineage, read_report, write_build_report
from cdrmix.corpus.outcome import (
    check_something_is_left,
    held_out,
    log_domains,
    log_held_out,
    log_outcomes,
    source_outcomes,
)
from cdrmix.corpus.recipe import Recipe, load_recipe, passes
from cdrmix.corpus.recipe_steps import identity, make_step
from cdrmix.corpus.remote_jobs import Amounts, Engine, EngineName, Pool
from cdrmix.corpus.task_run import (
    Decision,
    TaskJob,
    leave_out_last,
    read_documents,
    read_record,
    run_task,
)
from cdrmix.corpus.tasks import content_key, make_tasks
from cdrmix.data.document import draw_by_key
from cdrmix.data.folders import locked, new_folder
from cdrmix.data.shards import (
    MANIFEST_FILE,
    SHARD_SUFFIXES,
    Manifest,
    ShardInfo,
    new_manifest,
    read_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
)
from cdrmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_tokenizer
from cdrmix.data.tokenizer_files import copy_tokenizer, file_digests
from cdrmix.errors import DataError
from cdrmix.hooks.plugin import plugin_digests

DEFAULT_VOCAB_SIZE = 50_272
_logger = log.get_logger(__name__)


def build_dataset(
    recipe_file: Path,
    out: Path,
    *,
    workers: int,
    engine: EngineName | Engine = "local",
    sbatch: Mapping[str, str] | None = None,
    task_bytes: int | None = None,
) -> Manifest:
    """Builds the token shards of a recipe into `out`, or continues an interrupted build.

    Args:
        workers: processes; 1 works in this one. With another engine, most jobs at a time.
        engine: runs the jobs: processes of this machine, SLURM, Ray, or an object of the caller.
        sbatch: options of sbatch, for SLURM.
        task_bytes: as in `make_tasks`.
    Raises:
        ConfigError: if the recipe is wrong, or names a path that is missing.
        DataError: if a source cannot be used, no document is left of one that does not allow
            it (`allow_empty`) or of the corpus, or `out` holds something else, such as another
            build, is in use or cannot be written.
    """
    # With the paths that it names: a build would meet a missing one hours later.
    recipe = load_recipe(recipe_file, for_build=True)
    if workers < 1:
        raise DataError(f"--workers {workers}: at least 1 is needed")
    if out.exists():
        # The lock is the first file of a build, so it marks a folder that a build may write to.
        if not out.is_dir() or (not (out / ".lock").exists() and any(out.iterdir())):
            raise DataError(
                f"{out}: exists and is not the folder of a data build. Give another --out."
            )
        # Not rglob, which fails where another build removes a folder meanwhile.
        for parent, folders, files in os.walk(out):
            paths = (Path(parent, name) for name in (*folders, *files))
            for link in filter(Path.is_symlink, paths):
                raise DataError(
                    f"{link}: is a symbolic link, which a build never makes; the build would write "
                    "to its target. Remove it, or give another --out."
                )
    try:
        with locked(out / ".lock", blocking=False) as is_locked:
            if not is_locked:
                raise DataError(
                    f"{out}: another build is writing there. Wait for it, or give another --out."
                )
            if isinstance(engine, str):
                engine = _engine_of(engine, workers, out / "work" / "slurm", sbatch or {})
            with engine as running:
                return _Build(recipe, recipe_file.stem, out, running, task_bytes).run()
    except OSError as error:
        raise DataError(
            f"{error.filename or out}: {error.strerror}. Finished work stays in {out}: correct "
            "this and start again to continue from there."
        ) from error


def _engine_of(name: EngineName, max_tasks: int, folder: Path, sbatch: Mapping[str, str]) -> Engine:
    """Returns the engine of a name; `folder` and `sbatch` are as for `SlurmEngine`."""
    if sbatch and name != "slurm":
        raise DataError(f"--sbatch {', '.join(sbatch)}: is for --engine slurm")
    # Imported here, since a core installation has neither datatrove nor Ray.
    try:
        if name == "slurm":
            from cdrmix.corpus.slurm_jobs import SlurmEngine

            return SlurmEngine(folder, max_tasks=max_tasks, sbatch=sbatch)
        if name == "ray":
            from cdrmix.corpus.ray_jobs import RayEngine

            return RayEngine(max_tasks=max_tasks)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise DataError(
            f"--engine {name} needs the package '{package}': pip install 'cdrmix[{name}]'"
        ) from None
    return Pool(max_tasks)


def task_amounts(jobs: Sequence[TaskJob]) -> Amounts | None:
    """Returns the bytes that each job reads; None if a stream, of unknown size, is among them."""
    if any(job.before is None and not job.task.files for job in jobs):
        return None
    sizes = [
        sum(file.state[0] for file in job.task.files)
        if job.before is None
        else int(read_record(job.before)["text_bytes"])
        for job in jobs
    ]
    return Amounts("B", sizes)


class _Build:
    """One build, under its lock."""

    def __init__(
        self, recipe: Recipe, name: str, out: Path, engine: Engine, task_bytes: int | None
    ) -> None:
        self._recipe = recipe
        self._out = out
        self._engine = engine
        self._name = name
        self._work = out / "work"
        self._tasks, self._listings = make_tasks(recipe, out=out, task_bytes=task_bytes)
        self._share = recipe.shards.validation_share
        # Recorded in the report: a second start compares it with the sources and the recipe.
        self._key = content_key(
            config_hash(recipe),
            [task.key for task in self._tasks],
            [identity(step) for step in recipe.stages],
        )
        self._code = tuple(plugin_digests(plugins_of(recipe)).items())
        # Reports of the steps over the corpus, by their number in the recipe.
        self._decisions: dict[int, Any] = {}

    def run(self) -> Manifest:
        """Runs all phases; each continues from the results on disk."""
        if (self._out / MANIFEST_FILE).exists():
            if read_report(self._out).get("key") != self._key:
                raise DataError(
                    f"{self._out}: holds a finished data set of another recipe, or of sources that "
                    "have changed since. Give another --out, or delete it."
                )
            shutil.rmtree(self._work, ignore_errors=True)
            _logger.info("data build: %s is finished already", self._out)
            return read_manifest(self._out)
        # Folders that a killed process was writing; the lock says that it is gone.
        for leftover in self._work.glob("*/.*.building-*"):
            shutil.rmtree(leftover)
        _logger.info(
            "data build: %d tasks from %d sources", len(self._tasks), len(self._recipe.sources)
        )
        results = self._run_passes()
        outcomes = source_outcomes(self._recipe, self._listings, self._tasks, results)
        # Before the tokenizer: a mistake in the recipe must not cost the hours after it.
        check_something_is_left(outcomes, self._out)
        folder = self._make_tokenizer(results[-1])
        # Of a model's token ids: a small corpus gives fewer tokens than there are slots.
        config = self._recipe.tokenizer
        num_slots = config.vocab_size or DEFAULT_VOCAB_SIZE
        if config.path:
            num_slots = load_tokenizer(folder).vocab_size
        streams = self._write_shards(results[-1], folder, num_slots)
        # Counted before the work folder goes.
        tokens = encoded_tokens(streams)
        outcome = BuildOutcome(
            sources=[each.as_json(tokens[each.source.name]) for each in outcomes],
            held_out=held_out(split_sizes(streams), self._share),
            fim=fim_counts(streams) if self._recipe.fim is not None else None,
        )
        manifest = self._finish(results, folder, streams, num_slots, outcome)
        log_domains((source.domain for source in self._recipe.sources), manifest)
        log_held_out(outcome.held_out)
        log_outcomes(outcomes, tokens, self._out)
        return manifest

    def _run_passes(self) -> list[list[Path]]:
        """Returns the result folders of each pass, by task in corpus order."""
        results: list[list[Path]] = []
        decisions: list[Decision | None] = [None] * len(self._tasks)
        for pass_number, (steps, corpus_step) in enumerate(passes(self._recipe)):
            jobs = []
            for place, (task, decision) in enumerate(zip(self._tasks, decisions, strict=True)):
                domain = task.source.domain
                before = results[-1][place] if results else None
                its_steps = tuple(step for step in steps if step[1].takes(domain))
                notes_of = corpus_step[1] if corpus_step else None
                if notes_of is not None and not notes_of.takes(domain):
                    notes_of = None
                # All that the result follows from. The name of the result before has the same of
                # the earlier passes, so a change of a late step leaves early results valid.
                key = content_key(
                    before.name if before else task.key,
                    hashlib.sha256(decision[2].read_bytes()).hexdigest() if decision else None,
                    [(number, identity(step)) for number, step in its_steps],
                    identity(notes_of) if notes_of else None,
                    self._recipe.keep_dropped,
                )
                out = self._work / f"pass-{pass_number}" / key
                keep = self._recipe.keep_dropped
                job = TaskJob(task, before, decision, its_steps, notes_of, out, keep, self._code)
                jobs.append(job)
            what = f"pass {pass_number + 1}"
            amounts = task_amounts(jobs)
            self._engine.run_all(run_task, jobs, what=what, blame=leave_out_last, amounts=amounts)
            results.append([job.out for job in jobs])
            if corpus_step is None:
                continue
            number, config = corpus_step
            step = make_step(config)
            # The notes are named by the task: the step looks at those of all tasks together.
            notes = [job.out / f"{job.out.name}.notes" if job.notes_of else None for job in jobs]
            taken = [path for path in notes if path]
            out = self._work / f"decision-{number}" / content_key([path.name for path in taken])
            if not out.is_dir():
                _logger.info("data build: %s over %d tasks", config.name, len(taken))
                with new_folder(out) as folder:
                    summary = step.decide(taken, folder)
                    write_file(folder / "found.json", json.dumps(summary).encode())
            # Read back even if just written: JSON makes text of integer keys, and a build that was
            # interrupted must give the same report as one that was not.
            self._decisions[number] = json.loads((out / "found.json").read_bytes())
            decisions = [
                (number, config, step.decision(path, out)) if path else None for path in notes
            ]
        return results

    def _make_tokenizer(self, folders: list[Path]) -> Path:
        """Returns the folder of the tokenizer: what the recipe names, or trained on the corpus."""
        config = self._recipe.tokenizer
        if config.path is not None:
            # A copy, so that what the recipe says about special tokens goes with it.
            source = Path(config.path)
            key = content_key(file_digests(source), config.model_dump())
            path = self._work / "tokenizer" / key
            if not path.is_dir():
                with new_folder(path) as new:
                    copy_tokenizer(source, new, config.choices())
            return path
        key = content_key([folder.name for folder in folders], config.model_dump(), self._share)
        path = self._work / "tokenizer" / key
        if not path.is_dir():
            # Training needs all texts in memory, so a large corpus gives a sample of them: the
            # same documents on every machine, since the hash of the id draws them.
            num_bytes = sum(read_record(folder)["text_bytes"] for folder in folders)
            share = config.training_bytes / max(1, num_bytes)
            texts = (
                document.text
                for task, folder in zip(self._tasks, folders, strict=True)
                for document in read_documents(folder, task)
                if split_of(document.id, self._share) == "train"
                and draw_by_key(document.id, "tokenizer") < share
            )
            num_slots = config.vocab_size or DEFAULT_VOCAB_SIZE
            _logger.info("data build: training a tokenizer of %d tokens", num_slots)
            new_tokenizer = train_tokenizer(texts, num_slots)
            with new_folder(path) as new:
                write_file(new / TOKENIZER_FILE, new_tokenizer.to_str(pretty=True).encode())
        return path

    def _write_shards(
        self, folders: list[Path], tokenizer_folder: Path, num_slots: int
    ) -> list[StreamJob]:
        """Encodes all tasks and writes their shards, by one job for each split and domain."""
        digests = file_digests(tokenizer_folder)
        tokenizer = load_tokenizer(tokenizer_folder)
        fim = self._recipe.fim
        dtype = smallest_dtype(num_slots)
        # Another Python may parse other documents.
        parser = sys.version_info[:2] if fim is not None and fim.span == "ast" else None
        jobs = []
        for task, folder in zip(self._tasks, folders, strict=True):
            how = fim and fim.model_dump() | ({"parser": parser} if parser else {})
            key = content_key(folder.name, digests, self._share, how)
            out = self._work / "tokens" / key
            job = EncodeJob(task, folder, tokenizer_folder, dtype, self._share, fim, out)
            jobs.append(job)
        amounts = Amounts("B", [read_record(folder)["text_bytes"] for folder in folders])
        self._engine.run_all(run_encode, jobs, what="encode", amounts=amounts)
        # Shards are written in place: their results are deleted first, so that none of them
        # declares a shard complete that is half written.
        shards = (path for suffix in SHARD_SUFFIXES for path in self._out.glob(f"*.{suffix}"))
        for leftover in (*self._work.glob("*.json"), *shards):
            leftover.unlink()
        streams = []
        # Sorted: the order of shards in the manifest must not depend on the order of sources.
        for split in SPLITS:
            for domain in sorted({task.source.domain for task in self._tasks}):
                of_domain = (job for job in jobs if job.task.source.domain == domain)
                stream = StreamJob(
                    parts=tuple((job.task.source.name, job.out) for job in of_domain),
                    split=split,
                    domain=domain,
                    dtype=dtype,
                    eos_id=tokenizer.eos_id,
                    max_tokens=self._recipe.shards.max_tokens,
                    window_tokens=fim.window_tokens if fim and split == SPLITS[0] else None,
                    out=self._out,
                    result=self._work / f"{split}-{domain}.json",
                )
                streams.append(stream)
        amounts = Amounts("tokens", [encoded_tokens([stream]).total() for stream in streams])
        self._engine.run_all(write_stream, streams, what="shards", amounts=amounts)
        return streams

    def _finish(
        self,
        results: list[list[Path]],
        tokenizer_folder: Path,
        streams: list[StreamJob],
        num_slots: int,
        outcome: BuildOutcome,
    ) -> Manifest:
        """Writes tokenizer, report and manifest, and removes the work folder."""
        tokenizer = copy_tokenizer(tokenizer_folder, self._out)
        records = [read_record(folder) for folder in results[-1]]
        written = [(stream, json.loads(stream.result.read_bytes())) for stream in streams]
        shards = [
            (ShardInfo.model_validate(shard), documents)
            for _, result in written
            for shard, documents in zip(result["shards"], result["sources"], strict=True)
        ]
        manifest = new_manifest(
            [shard for shard, _ in shards],
            vocab_size=num_slots,
            tokenizer=tokenizer,
            eos_id=streams[0].eos_id,
            source=lineage(self._recipe, self._name, self._tasks, records, shards),
        )
        write_build_report(
            self._out,
            key=self._key,
            recipe=self._recipe,
            listings=self._listings,
            results=list(zip(self._tasks, *results, strict=True)),
            decisions=self._decisions,
            outcome=outcome,
            # Of the training split: the other has too few tokens to compare domains by.
            ngrams={s.domain: each["ngrams"] for s, each in written if s.split == SPLITS[0]},
        )
        # Last of all files: a folder with a manifest is a finished data set.
        write_manifest(self._out, manifest)
        shutil.rmtree(self._work)
        tokens = ", ".join(f"{info.tokens:,} {split}" for split, info in manifest.splits.items())
        _logger.info("data build: %s; tokens: %s", self._out, tokens)
        return manifest

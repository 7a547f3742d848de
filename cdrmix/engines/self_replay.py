"""Replay that the starting model writes itself, for a model whose old data are not at hand."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdrmix import runtime
from cdrmix.checkpoint.base_model import REPLAY_FOLDER, run_of
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.data.folders import new_folder, remove_unfinished
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.shards import (
    MANIFEST_FILE,
    Document,
    new_manifest,
    read_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
    write_shards,
)
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer_base import Tokenizer
from cdrmix.engines.old_data import open_replay
from cdrmix.engines.run import Start
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import DataError, StateError
from cdrmix.log import get_logger
from cdrmix.models.generate import generate
from cdrmix.parallel.apply import for_inference
from cdrmix.parallel.topology import Topology

logger = get_logger(__name__)

# Of a pass. Fixed, so that the documents are the same whatever the layout; a cache of keys and
# values for so many is small beside the weights.
_DOCUMENTS_AT_ONCE = 8
_DOMAIN = "self"
# Of a model that ends each document with its first token nothing can be had.
_MOST_EMPTY_TURNS = 8


def own_replay(
    start: Start,
    corpus: Corpus,
    topology: Topology,
    engine: Any,
    checkpoint: FoundCheckpoint | None,
) -> TokenDataset | MixedDataset:
    """Opens the text that the starting model has written, or has it write; collective.

    Args:
        engine: with the weights that the run begins with, or those of `checkpoint`, which write
            nothing: of a run that goes on, the text must be there.
    Raises:
        StateError: on every rank, if it is not, or another model wrote it.
        DataError: on every rank, if the text cannot be written, or is not the same on all hosts.
    """
    assert start.config.cpt is not None and start.config.cpt.replay is not None
    replay = start.config.cpt.replay
    folder = start.directory.path / REPLAY_FOLDER
    length = replay.self_document_tokens or start.config.training.sequence_length
    origin: dict[str, Any] = {
        "text": "written by the starting model",
        "model": _digest_of_model(start),
        "seed": start.config.training.seed,
        "tokens": replay.self_tokens,
        "document_tokens": length,
    }

    def is_written() -> bool:
        if checkpoint is not None:
            _bring(folder, checkpoint)
            _refuse_other(folder, origin["model"])
            return True
        return (folder / MANIFEST_FILE).exists() and read_manifest(folder).source == origin

    def copy() -> None:
        for place in start.directory.copies:
            _copy(folder, place / REPLAY_FOLDER)

    if not runtime.first_rank_does(is_written):
        began = time.monotonic()
        logger.info(
            "replay: the starting model writes %s tokens, in documents of up to %s",
            *(f"{replay.self_tokens:,}", f"{length:,}"),
        )
        documents = _written(start, replay.self_tokens, length, corpus, topology, engine)
        runtime.first_rank_does(lambda: _save(folder, documents, corpus, origin))
        logger.info(
            "replay: %d documents of the starting model in %s, written in %.1f s",
            *(len(documents), folder, time.monotonic() - began),
        )
    runtime.first_rank_does(copy)
    return open_replay(start.config, corpus, folder, key="cpt.replay.source")


def _digest_of_model(start: Start) -> str | None:
    """sha256 of the weights that a run begins with, hex; None where a resumed run does not know."""
    if start.base is not None:
        return str(start.base["digest"])
    return None if start.start_from is None else str(start.start_from["manifest_sha256"])


def _refuse_other(folder: Path, model: str | None) -> None:
    """Raises StateError if another model wrote the text of a run that goes on; rank 0."""
    writer = read_manifest(folder).source.get("model")
    if model is not None and writer is not None and writer != model:
        raise StateError(
            f"{folder}: was written by another model, of digest {writer[:12]}, and the run began "
            f"with {model[:12]}. Bring back the text of this run, or begin a new one"
        )


def _bring(folder: Path, checkpoint: FoundCheckpoint) -> None:
    """Copies the text from the run of a checkpoint, unless this run directory has it; rank 0."""
    if (folder / MANIFEST_FILE).exists():
        return
    run_dir = run_of(checkpoint.path)
    source = None if run_dir is None else run_dir / REPLAY_FOLDER
    if source is None or not (source / MANIFEST_FILE).exists():
        place = f"beside {checkpoint.path}" if source is None else source
        raise StateError(
            f"{folder}: not found, nor {place}: the text that the starting model wrote before the "
            "first step, which the order of the samples counts in. Bring it back from where the "
            "run was, or begin a new run"
        )
    _copy(source, folder)


def _copy(source: Path, folder: Path) -> None:
    """Copies the text to where it is not, or another one is; whole or not at all; rank 0."""
    try:
        manifest = (source / MANIFEST_FILE).read_bytes()
        if (folder / MANIFEST_FILE).exists():
            if (folder / MANIFEST_FILE).read_bytes() == manifest:
                return
            shutil.rmtree(folder)
        with new_folder(folder) as made:
            shutil.copytree(source, made, dirs_exist_ok=True)
    except OSError as error:
        raise StateError(
            f"{error.filename or folder}: the text of the starting model cannot be copied "
            f"({error.strerror or error}). Make room, or give a folder that this user can write to"
        ) from error


def _written(
    start: Start,
    num_tokens: int,
    length: int,
    corpus: Corpus,
    topology: Topology,
    engine: Any,
) -> list[NDArray[np.int64]]:
    """Documents of together `num_tokens` tokens or more, in order, on rank 0; collective.

    The n-th batch of documents follows from the seed and n alone, and the data ranks take turns, so
    that any number of them writes the same text, but for rounding.
    """
    tokenizer = corpus.tokenizer
    documents: list[NDArray[np.int64]] = []
    total = 0
    turn = 0
    # Documents in training begin so, too: with BOS, or behind the EOS of the one before.
    prefix = torch.tensor(tokenizer.prefix_ids, device=engine.device)
    prompt = prefix.expand(_DOCUMENTS_AT_ONCE, -1)
    while total < num_tokens:
        batch = turn * topology.degrees.data + topology.data_rank
        with start.heartbeat.phase("writing replay"):
            # Without a stop token: all ranks take part in every pass, where they share weights.
            rows = generate(
                for_inference(engine.module),
                prompt,
                max_new_tokens=length,
                temperature=1.0,
                seed=_seed(start.config.training.seed, batch),
            )
        # Ranks of a tensor group or pipeline have the same rows, and one of them counts.
        mine = [*_cut(rows.cpu().numpy(), tokenizer)] if topology.counts_tokens else []
        everywhere = runtime.all_gather_object((topology.data_rank, mine))
        for _, theirs in sorted(everywhere, key=itemgetter(0)):
            for document in theirs:
                # The other ranks count, and keep no text.
                if total < num_tokens and runtime.rank() == 0:
                    documents.append(document)
                total += len(document)
        turn += 1
        if not total and turn == _MOST_EMPTY_TURNS:
            raise StateError(
                "cpt.replay.source = self: the starting model writes nothing but ends of "
                "documents. Give a folder of old data"
            )
    return documents


def _seed(seed: int, batch: int) -> int:
    """Seed of a batch of documents, unlike that of any batch of another seed of a run."""
    return int(np.random.SeedSequence((seed, batch)).generate_state(1)[0])


def _cut(rows: NDArray[np.int64], tokenizer: Tokenizer) -> Iterator[NDArray[np.int64]]:
    """Cuts each row behind its EOS, or ends it with one; empty documents are left out."""
    for row in rows:
        ends = np.flatnonzero(row == tokenizer.eos_id)
        text = row[: ends[0]] if len(ends) else row
        # A model may have more rows than there are tokens.
        text = text[text < tokenizer.vocab_size]
        if len(text):
            yield np.array([*tokenizer.document_prefix, *text, tokenizer.eos_id])


def _save(
    folder: Path, documents: list[NDArray[np.int64]], corpus: Corpus, origin: dict[str, Any]
) -> None:
    """Writes the documents as a folder of token shards; rank 0."""
    tokenizer = corpus.tokenizer
    vocab_size = corpus.manifest.vocab_size
    begin = len(tokenizer.document_prefix)

    def pieces() -> Iterator[Document]:
        for document in documents:
            yield document, len(tokenizer.decode(document[begin:-1]).encode())

    try:
        remove_unfinished(folder)
        if folder.exists():  # of an earlier start of this run, with other settings
            shutil.rmtree(folder)
        with new_folder(folder) as made:
            # As it lies beside the new data, so that both have one tokenizer.
            for name in corpus.manifest.tokenizer.digests():
                write_file(made / name, (corpus.folder / name).read_bytes())
            shards = write_shards(
                made, pieces(), split="train", domain=_DOMAIN, dtype=smallest_dtype(vocab_size)
            )
            manifest = new_manifest(
                shards,
                vocab_size=vocab_size,
                tokenizer=corpus.manifest.tokenizer,
                eos_id=tokenizer.eos_id,
                source=origin,
            )
            write_manifest(made, manifest)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: {error.strerror}. The text of the starting model is "
            "written there: make room, or give another --run-dir"
        ) from error

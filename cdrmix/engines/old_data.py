"""Old data of continual pre-training: its training split for replay, and its held-out splits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cdrmix import runtime
from cdrmix.config.cpt import CptConfig
from cdrmix.config.schema import Config
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.replay import check_tokenizers, open_old
from cdrmix.data.shards import manifest_digest, read_manifest, verify_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.training_data import Corpus, check_same


class HeldOut(NamedTuple):
    """Validation split of a data set that a run measures its loss on."""

    name: str  # unique among the sets of a run
    dataset: TokenDataset


class OldData(NamedTuple):
    """Old data of a run, opened and verified."""

    replay: TokenDataset | MixedDataset | None  # None without replay, or while it is not written
    held_out: tuple[HeldOut, ...]


def open_old_data(config: Config, cpt: CptConfig, corpus: Corpus) -> OldData:
    """Opens the folders that section `cpt` names; collective.

    Raises DataError on every rank, if one is missing, truncated or altered, has another tokenizer
    than `corpus`, the new data, or ranks have different ones.
    """
    replay = None
    if cpt.replay is not None and cpt.replays and not cpt.writes_replay:
        source = Path(cpt.replay.source)
        replay = open_replay(config, corpus, source, key="cpt.replay.source")
    key = "cpt.replay.source" if cpt.forgetting.data is None else "cpt.forgetting.data"

    def open_held_out() -> tuple[HeldOut, ...]:
        return tuple(
            HeldOut(name, _verified_validation(config, corpus, Path(folder), key))
            for name, folder in zip(names_of(cpt.old_data), cpt.old_data, strict=True)
        )

    held_out = runtime.together(open_held_out)
    for each in held_out:
        check_same(f"old data in {each.name}", "manifest", each.dataset.manifest_digest)
    return OldData(replay, held_out)


def open_replay(
    config: Config, corpus: Corpus, folder: Path, *, key: str
) -> TokenDataset | MixedDataset:
    """Opens the training split of a folder of old data; collective. Raises as `open_old_data`."""

    def open_here() -> TokenDataset | MixedDataset:
        manifest = read_manifest(folder, given_as=key)
        check_tokenizers(corpus.manifest, manifest, data=config.data, key=key, folder=folder)
        rank, parts = runtime.rank(), runtime.world_size()
        verify_shards(folder, manifest, part=rank, parts=parts, mode=config.data.verify)
        return open_old(folder, config.training.sequence_length, key=key)

    replay = runtime.together(open_here)
    check_same("data for replay", "manifest", replay.manifest_digest)
    return replay


def names_of(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Names of folders for people: their last parts, or whole paths where two have the same."""
    last = [Path(folder).absolute().name for folder in folders]
    return tuple(
        name if last.count(name) == 1 else str(Path(folder).absolute())
        for name, folder in zip(last, folders, strict=True)
    )


def _verified_validation(config: Config, corpus: Corpus, folder: Path, key: str) -> TokenDataset:
    manifest = read_manifest(folder, given_as=key)
    check_tokenizers(corpus.manifest, manifest, data=config.data, key=key, folder=folder)
    # Of what was opened for replay, every shard is verified already.
    shards = tuple(shard for shard in manifest.shards if shard.split == "validation")
    held_out = manifest.model_copy(update={"shards": shards})
    rank, parts = runtime.rank(), runtime.world_size()
    verify_shards(folder, held_out, part=rank, parts=parts, mode=config.data.verify)
    dataset = TokenDataset(folder, "validation", config.training.sequence_length)
    assert dataset.manifest_digest == manifest_digest(manifest)
    return dataset

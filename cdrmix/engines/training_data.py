"""The data set of a run: opened, verified, equal on all hosts, and shared out over ranks."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cdrmix import runtime
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.cluster.start_records import recorded_data
from cdrmix.config.load import SAMPLE
from cdrmix.config.schema import Config
from cdrmix.data.mixture import MixedDataset, built_mixture
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.sample import ensure_sample
from cdrmix.data.shards import Manifest, check_vocab, manifest_digest, read_manifest, verify_shards
from cdrmix.data.token_dataset import TokenDataset, domain_tokens, fim_window
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.data.tokenizer_files import check_tokenizer
from cdrmix.errors import DataError
from cdrmix.log import get_logger

logger = get_logger(__name__)


class Corpus(NamedTuple):
    """Token shards of a run, opened and verified."""

    manifest: Manifest
    train: TokenDataset | MixedDataset
    validation: TokenDataset  # held out
    tokenizer: Tokenizer
    folder: Path  # on this host


def recorded_sample(run_dir: Path, checkpoint: FoundCheckpoint | None) -> Path | None:
    """Folder of the sample corpus that the newest start read, of a run or of that of a checkpoint.

    None where none is on record, or the run has another data set. Collective.
    """

    def read() -> str | None:
        places = [run_dir]
        if checkpoint is not None and checkpoint.path.parent.name == "checkpoints":
            places.append(checkpoint.path.parent.parent)
        for place in places:
            if (folder := recorded_data(place, data_path=SAMPLE)) is not None:
                return str(folder)
        return None

    folder = runtime.first_rank_does(read)
    return Path(folder) if folder is not None else None


def open_corpus(config: Config, *, sample: Path | None = None) -> Corpus:
    """Open the data set of a run, building the sample corpus if data.path names it; collective.

    Args:
        config: of the run.
        sample: folder of the sample corpus of an earlier start; None: below the present folder.
    Raises:
        DataError: on every rank, if a shard is missing, truncated or altered, the tokenizer does
            not fit the model or is not that of its folder, or ranks have different data sets.
    """
    model = config.model
    sequence_length = config.training.sequence_length
    built: Path | None = None
    if config.data.path == SAMPLE:
        root = sample.parent if sample is not None else Path("data")
        built = Path(runtime.first_rank_does(lambda: str(ensure_sample(model.vocab_size, root))))

    def open_folder() -> Corpus:
        path = built or local_folder(config.data, sequence_length)
        manifest = read_manifest(path)
        check_vocab(manifest, model.vocab_size)
        if model.path is not None:  # what is behind a URL is looked at here for the first time
            check_tokenizer(manifest, Path(model.path))
        if runtime.rank() == 0:
            _warn_of_recipe(config.data.recipe, manifest.source.get("recipe"), str(path))
            _warn_of_window(fim_window(manifest), sequence_length, str(path))
            if fim_window(manifest) is not None and config.data.mixture is None:
                sizes = domain_tokens(manifest, "train")
                short = tuple(name for name, size in sizes.items() if size <= sequence_length)
                _warn_of_short_domains(short, sequence_length, str(path))
        # Every rank verifies a part: digests of a large data set take one rank too long.
        verify_shards(
            path, manifest, part=runtime.rank(), parts=runtime.world_size(), mode=config.data.verify
        )
        # The mixture of the run, else the one that the data set was built with.
        mixture = config.data.mixture or built_mixture(manifest)
        train: TokenDataset | MixedDataset
        if mixture is None:
            train = TokenDataset(path, "train", sequence_length)
        else:
            train = MixedDataset(path, "train", sequence_length, mixture)
        validation = TokenDataset(path, "validation", sequence_length)
        return Corpus(manifest, train, validation, load_tokenizer(path), path)

    corpus = runtime.together(open_folder)
    # The checks so far are of one host each. Ranks with different data sets would train on, each
    # on the samples that it has, without an error.
    check_same("data sets", "manifest", manifest_digest(corpus.manifest))
    check_same("tokenizers", "tokenizer", corpus.manifest.tokenizer.sha256)
    return corpus


def check_same(things: str, name: str, digest: str) -> None:
    """Raises DataError on every rank if they have different inputs; collective.

    The message names the kind of input, `things`, and the `name` of its digest.
    """
    hosts: dict[str, list[str]] = {}
    everywhere = runtime.all_gather_object((socket.gethostname(), digest))
    for rank, (host, theirs) in enumerate(everywhere):
        hosts.setdefault(theirs, []).append(f"rank {rank} on {host}")
    if len(hosts) == 1:
        return
    lines = []
    for theirs, ranks in hosts.items():
        # Of thousands of ranks the first few say enough.
        others = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        lines.append(f"  {name} {theirs[:12]}: {', '.join(ranks[:8])}{others}\n")
    raise DataError(
        f"ranks have different {things}:\n{''.join(lines)}Every host must have the same. Try a "
        "folder that all hosts share, or copy it again to the hosts where it differs"
    )


@cache  # once a run, as below
def _warn_of_window(window: int | None, sequence_length: int, folder: str) -> None:
    """Warn of samples that cut documents for infilling, which were placed by other windows."""
    if window is not None and sequence_length % window:
        logger.warning(
            "warning: %s was built with fim.window_tokens = %d, and training.sequence_length = %d "
            "is no multiple of it: samples cut some of its documents for infilling before their "
            "middle. Build it with fim.window_tokens = %d",
            *(folder, window, sequence_length, sequence_length),
        )


@cache  # once a run, as below
def _warn_of_short_domains(domains: tuple[str, ...], sequence_length: int, folder: str) -> None:
    """Warn of domains without a sample, where each is cut by itself."""
    if domains:
        logger.warning(
            "warning: %s was built with fim.window_tokens, so that each domain is cut into samples "
            "by itself, and %s has no more than training.sequence_length = %d tokens: none of it "
            "is trained on",
            *(folder, ", ".join(domains), sequence_length),
        )


@cache  # once a run: Stage B opens the data set again
def _warn_of_recipe(recipe: str | None, built_by: str | None, folder: str) -> None:
    """Warn of a data set that another recipe than the model's built, where both are named."""
    if recipe is not None and built_by is not None and built_by != recipe:
        logger.warning(
            "warning: %s was built by the recipe '%s', and data.recipe = '%s' is made for this "
            "model. Build that one with `cdrmix data build`, or set data.recipe=null.",
            *(folder, built_by, recipe),
        )

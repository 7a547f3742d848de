"""Old data among the samples of new data, for a model that is trained on.

With the share p of replay, global sample n is old where floor((n + 1) p) > floor(n p). So any
stretch of the global order holds its share to within one sample, and the number of old samples
before n is floor(n p), at any position at once: the order stays a function of the sample number.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdrmix.config.schema import DataConfig
from cdrmix.data.mixture import MixedDataset, built_mixture
from cdrmix.data.shards import MANIFEST_FILE, Manifest, read_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError

_DIGEST = 12  # characters of a digest that a person compares


class ReplayDataset:
    """Samples of two data sets, numbered those of the new one first and then those of the old.

    Either has the order, the domains and the epochs that it has alone.

    Args:
        new, old: of one sequence length and one tokenizer.
        share: of the samples that are old, from 0 and below 1, with a denominator up to 10,000.
    """

    def __init__(
        self, new: TokenDataset | MixedDataset, old: TokenDataset | MixedDataset, share: Fraction
    ) -> None:
        assert new.sequence_length == old.sequence_length
        self.new = new
        self.old = old
        self.share = share
        self.folder = new.folder
        self.split = new.split
        self.sequence_length = new.sequence_length
        self.manifest = new.manifest
        self.manifest_digest = new.manifest_digest
        self.mixture = new.mixture
        self.num_samples = new.num_samples + old.num_samples
        mixed = f", mixture {old.mixture}" if old.mixture else ""
        self.replay = (
            f"{share} of the samples from {old.manifest_digest[:_DIGEST]} "
            f"({old.num_samples} samples{mixed})"
        )

    def num_old(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Old samples before each global sample number, of the same shape."""
        # Whole numbers: exact up to number 9e14, where floats lose samples long before.
        return numbers * self.share.numerator // self.share.denominator

    def order(
        self, numbers: NDArray[np.int64], seed: int | None, window: int | None = None
    ) -> NDArray[np.int64]:
        """Sample at each global sample number; seed and window as of `TokenDataset.order`."""
        before = self.num_old(numbers)
        is_old = self.num_old(numbers + 1) > before
        indices = np.empty_like(numbers)
        indices[~is_old] = self.new.order((numbers - before)[~is_old], seed, window)
        indices[is_old] = self.new.num_samples + self.old.order(before[is_old], seed, window)
        return indices

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Reads samples by number, [n] -> [n, T + 1], int64; an IndexError beyond the last."""
        is_old, old = self._old(indices)
        rows = np.empty((len(indices), self.sequence_length + 1), dtype=np.int64)
        rows[~is_old] = self.new.rows(indices[~is_old])
        rows[is_old] = self.old.rows(old)
        return rows

    def roles(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Roles of the tokens of `rows(indices)`, of the same shape; see `ShardInfo`."""
        is_old, old = self._old(indices)
        roles = np.empty((len(indices), self.sequence_length + 1), dtype=np.int64)
        roles[~is_old] = self.new.roles(indices[~is_old])
        roles[is_old] = self.old.roles(old)
        return roles

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Announces samples that are read soon, any shape; see `TokenStream`."""
        is_old, old = self._old(indices)
        self.new.expect(indices[~is_old])
        self.old.expect(old)

    def drawn(self, start: int, stop: int) -> dict[str, int]:
        """Samples of each domain in global samples start .. stop - 1.

        Old ones are of `replay/DOMAIN`, or of `replay/all` where a sample may span several; new
        ones without a mixture are `new`. A domain's own name has no slash.
        """
        before, after = (int(self.num_old(np.array(number))) for number in (start, stop))
        new = self.new.drawn(start - before, stop - after)
        old = self.old.drawn(before, after)
        name = self.old.domains[0] if len(self.old.domains) == 1 else "all"
        return {
            **(new or {"new": stop - start - (after - before)}),
            **{f"replay/{domain}": n for domain, n in (old or {name: after - before}).items()},
        }

    def _old(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Places of the old samples among `indices`, and their numbers in the old data set."""
        is_old = indices >= self.new.num_samples
        return is_old, indices[is_old] - self.new.num_samples


def open_old(folder: Path, sequence_length: int, *, key: str) -> TokenDataset | MixedDataset:
    """Opens the training split of old data, in the mixture that it was built with, if any.

    `key` is that of the configuration. Raises DataError if it is missing or too small.
    """
    mixture = built_mixture(read_manifest(folder, given_as=key))
    if mixture is None:
        return TokenDataset(folder, "train", sequence_length)
    return MixedDataset(folder, "train", sequence_length, mixture)


def check_tokenizers(
    new: Manifest, old: Manifest, *, data: DataConfig, key: str, folder: Path
) -> None:
    """Raises a DataError if old data were built with another tokenizer than the new, or with other
    tokens around documents.

    The files may differ in parts that do not decide the ids, where both manifests tell of these.
    """
    digests = (new.tokenizer.sha256, old.tokenizer.sha256)
    contents = (new.tokenizer.content_sha256, old.tokenizer.content_sha256)
    if digests[0] != digests[1] and (contents[0] is None or contents[0] != contents[1]):
        here, there = (digest[:_DIGEST] for digest in digests)
        raise DataError(
            f"{key} = {folder}: was built with another tokenizer than data.path = {data.path}: "
            f"sha256 {there} there, {here} here ({MANIFEST_FILE}). Build both with one tokenizer: "
            "a model reads the ids of one alone"
        )
    around = {
        "eos_id": (new.eos_id, old.eos_id),
        "document_prefix": (
            list(new.tokenizer.document_prefix),
            list(old.tokenizer.document_prefix),
        ),
    }
    if differing := [
        f"{name} {there} there, {here} here"
        for name, (here, there) in around.items()
        if here != there
    ]:
        raise DataError(
            f"{key} = {folder}: was built with other tokens around documents than data.path = "
            f"{data.path}: {'; '.join(differing)} ({MANIFEST_FILE}). Build both with the same "
            "tokenizer section of the recipe (cdrmix data build)"
        )

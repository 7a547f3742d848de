"""Export of a run that began with a Hugging Face model: in the base's own names and layout.

What the base's folder held beside its weights goes along byte by byte. Names and boxes are those by
which the base was read, backwards; tensors pass in pieces, whatever source gives their values.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdrmix.checkpoint.base_model import base_of_adapters, recorded_digest, small_files
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import FileRecord, digest, write_text
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.weight_folder import TYPES
from cdrmix.checkpoint.weight_source import CheckpointWeights, WeightSource, check_source
from cdrmix.config.hugging_face import CONFIG_FILE, read_model_config
from cdrmix.config.safetensors_headers import RECORD_FILE, tensor_sizes
from cdrmix.config.schema import Config
from cdrmix.export.peft_adapter import MergedWeights, RunAdapters
from cdrmix.export.provenance import (
    CARD_FILE,
    METADATA_FILE,
    hub_name,
    metadata_text,
    model_card,
    training_metadata,
)
from cdrmix.export.rwkx_run import DTYPES
from cdrmix.export.weights import boxes, write_shards
from cdrmix.hf.weights import kept_in_float32, map_names, skeleton

_READ_ELEMENTS = 2**22
_USE = (
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
    'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
    "```",
)


@dataclass(frozen=True)
class _Target:
    """A tensor of the exported files."""

    name: str  # logical name of the parameter that it is, or is a part of
    box: Box  # the part, in the logical tensor
    shape: tuple[int, ...]  # in the file
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HuggingFaceRun:
    """A checkpoint of a run from a Hugging Face model, checked and ready to be written.

    Attributes:
        checkpoint: verified.
        num_parameters: of the model, tied ones counted once.
        dtype: type of the exported weights.
        num_bytes: size of them.
        left_out: nothing.
    """

    left_out: tuple[str, ...] = ()

    def __init__(
        self,
        checkpoint: FoundCheckpoint,
        reader: CheckpointFile,
        config: Config,
        source: WeightSource,
    ) -> None:
        """Maps the names of the base, and compares them with those of the weights.

        Args:
            checkpoint, reader: of the run.
            config: of it; `model.path` holds what the run keeps of its base, or the base.
            source: all weights of the model, those of the checkpoint for one trained whole.
        Raises:
            ConfigError, DataError: if the base cannot be used.
            StateError: if the weights are of another model.
        """
        self.checkpoint = checkpoint
        self.dtype = DTYPES[config.training.precision]
        self._state = reader.state
        self._weights = reader.weights
        self._config = config
        self._source = source
        self._folder = Path(str(config.model.path))
        sizes = tensor_sizes(self._folder)
        model = skeleton(self._folder, config.model.remote_code)
        shapes = {name: size.shape for name, size in sizes.items()}
        names = map_names(model, shapes, place=self._folder)
        self.num_parameters = sum(each.numel() for each in model.parameters())
        self.dropped = names.dropped
        whole = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        check_source(source, {name: whole[name] for name in names.parts})
        origins = names.origins()
        self._targets = {}
        for key, size in sizes.items():
            if key not in origins:  # what the model has no use for
                continue
            name, part = origins[key]
            dtype = TYPES[size.dtype]
            if dtype.is_floating_point:
                dtype = torch.float32 if kept_in_float32(model, name) else self.dtype
            self._targets[key] = _Target(name, Box(part.offset, part.shape), size.shape, dtype)

    @property
    def num_bytes(self) -> int:
        return sum(target.num_bytes for target in self._targets.values())

    def write(self, folder: Path, *, max_shard_bytes: int) -> dict[str, FileRecord]:
        """Writes all files but the manifest durably; gives their records.

        Raises:
            StateError: if the weights cannot be read.
            OSError: naming the file that cannot be read or written.
        """
        records = write_shards(folder, self._targets, self._values, max_shard_bytes=max_shard_bytes)
        for path in small_files(self._folder):
            if path.name != CONFIG_FILE or path.parent != self._folder:
                name = str(path.relative_to(self._folder))
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)
                size = (folder / name).stat().st_size
                records[name] = {"bytes": size, "sha256": digest(folder / name)}
        metadata = training_metadata(
            self.checkpoint,
            self._state,
            self._config,
            tokenizer_digest=str(self._state.get("tokenizer")),
            left_out=self.left_out,
            weights=self._weights,
        )
        metadata["base"] = self._base()
        texts = {
            CONFIG_FILE: self._config_text(),
            METADATA_FILE: metadata_text(metadata),
            CARD_FILE: self._card(metadata),
        }
        return records | {name: write_text(folder / name, text) for name, text in texts.items()}

    def _values(self, target: _Target) -> Iterator[Tensor]:
        """Reads a tensor in pieces, in its row-major order."""
        for box in boxes(target.box.shape, _READ_ELEMENTS):
            offset = tuple(a + b for a, b in zip(target.box.offset, box.offset, strict=True))
            part = Span.whole(Box(offset, box.shape))
            yield self._source.read(target.name, part).to(target.dtype)

    def _config_text(self) -> str:
        """Text of the base's config.json, with the type of these weights."""
        values = read_model_config(self._folder)
        values.pop("torch_dtype", None)  # the name in earlier versions
        return json.dumps(values | {"dtype": _name(self.dtype)}, indent=2) + "\n"

    def _base(self) -> dict[str, Any]:
        """Name, family and digest of the base, without its place on this machine."""
        recorded = self._state.get("base") or {}
        is_kept = (self._folder / RECORD_FILE).is_file()
        return {
            "name": hub_name(Path(recorded.get("folder") or self._folder)),
            "family": read_model_config(self._folder)["model_type"],
            "digest": recorded.get("digest")
            or (recorded_digest(self._folder) if is_kept else None),
            "dropped": list(self.dropped),
        }

    def _card(self, metadata: dict[str, Any]) -> str:
        """Makes the text of README.md."""
        base = metadata["base"]
        dropped = f"* left out, as when it is read: {', '.join(self.dropped)}"
        about = [
            f"{base['name']} trained further with CDRmix, and exported for transformers with the "
            "names and layout of its files.",
            "",
            f"* {self.num_parameters:,} parameters in {_name(self.dtype)}, family {base['family']}",
            f"* trained on sequences of {self._config.training.sequence_length:,} tokens",
            f"* base: config.json and weights of digest `{base['digest']}`",
            *([dropped] if self.dropped else []),
        ]
        return model_card(
            metadata,
            about=about,
            use=_USE,
            licence="The licence of the base holds for these weights too.",
            library="transformers",
            tags=(base["family"], "cdrmix"),
            base_model=base["name"],
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def weights_of(reader: CheckpointFile, config: Config, *, base: Path | None = None) -> WeightSource:
    """Weights of a run's model, all of them; those of adapters are merged into the base's.

    Args:
        base: folder of the base of its adapters; None: where the run has read it.
    Raises:
        StateError: if the base of adapters is not there, or another one is.
    """
    if config.model.lora is None:
        return CheckpointWeights(reader)
    # Its files close with the source, which lasts as long as the export.
    weights = base_of_adapters(reader.state, reader.path, config.model.remote_code, given=base)
    return MergedWeights(weights, RunAdapters(reader, config))

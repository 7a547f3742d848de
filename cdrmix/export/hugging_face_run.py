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
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor

from cdrmix.checkpoint.base_model import base_of_adapters, recorded_digest, small_files
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import MANIFEST_FILE as CHECKPOINT_MANIFEST
from cdrmix.checkpoint.files import (
    SAFETENSORS_TYPES,
    FileRecord,
    digest,
    write_json,
    write_tensors,
    write_text,
)
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.weight_source import CheckpointWeights, WeightSource, check_source
from cdrmix.config.hugging_face import CONFIG_FILE, read_model_config
from cdrmix.config.safetensors_headers import INDEX_FILE, RECORD_FILE, tensor_sizes
from cdrmix.config.schema import Config
from cdrmix.export.peft_adapter import MergedWeights, RunAdapters
from cdrmix.export.provenance import evaluations, metadata_text, result_lines, training_metadata
from cdrmix.export.weights import boxes, plan_shards
from cdrmix.hf.weights import kept_in_float32, map_names, skeleton

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_READ_ELEMENTS = 2**22
_TYPES = {stored: getattr(torch, name) for name, stored in SAFETENSORS_TYPES.items()}


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
    """

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
            dtype = _TYPES[size.dtype]
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
        records = self._write_weights(folder, max_shard_bytes)
        for path in small_files(self._folder):
            if path.name != CONFIG_FILE or path.parent != self._folder:
                name = str(path.relative_to(self._folder))
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)
                size = (folder / name).stat().st_size
                records[name] = {"bytes": size, "sha256": digest(folder / name)}
        metadata = self._metadata()
        texts = {
            CONFIG_FILE: self._config_text(),
            "training_metadata.json": metadata_text(metadata),
            "README.md": self._card(metadata),
        }
        return records | {name: write_text(folder / name, text) for name, text in texts.items()}

    def _write_weights(self, folder: Path, max_shard_bytes: int) -> dict[str, FileRecord]:
        """Writes the tensors in shards, with one piece of one tensor in memory at a time."""
        sizes = {key: target.num_bytes for key, target in self._targets.items()}
        shards = plan_shards(sizes, max_shard_bytes)
        records: dict[str, FileRecord] = {}
        for file, keys in shards.items():
            # the widest first, for aligned offsets
            targets = sorted(
                ((key, self._targets[key]) for key in keys),
                key=lambda each: -each[1].dtype.itemsize,
            )
            layout = [
                (key, torch.empty(target.shape, dtype=target.dtype, device="meta"))
                for key, target in targets
            ]
            data = (values for _, target in targets for values in self._values(target))
            records[file] = write_tensors(folder / file, layout, data)
        total = sum(math.prod(target.shape) for target in self._targets.values())
        index = {
            "metadata": {"total_size": self.num_bytes, "total_parameters": total},
            "weight_map": {key: file for file, keys in shards.items() for key in keys},
        }
        records[INDEX_FILE] = write_json(folder / INDEX_FILE, index)
        return records

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

    def _metadata(self) -> dict[str, Any]:
        path = self.checkpoint.path.resolve()
        metadata = training_metadata(
            path.parent.parent if path.parent.name == "checkpoints" else None,
            step=self.checkpoint.step,
            state=self._state,
            config=self._config,
            tokenizer_digest=str(self._state.get("tokenizer")),
            manifest_digest=digest(path / CHECKPOINT_MANIFEST),
            left_out=[],
        )
        return {**metadata, "base": self._base()}

    def _base(self) -> dict[str, Any]:
        """Name, family and digest of the base, without its place on this machine."""
        recorded = self._state.get("base") or {}
        is_kept = (self._folder / RECORD_FILE).is_file()
        return {
            "name": _hub_name(Path(recorded.get("folder") or self._folder)),
            "family": read_model_config(self._folder)["model_type"],
            "digest": recorded.get("digest")
            or (recorded_digest(self._folder) if is_kept else None),
            "dropped": list(self.dropped),
        }

    def _card(self, metadata: dict[str, Any]) -> str:
        """Makes the text of README.md."""
        base = metadata["base"]
        data = ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            base_model=base["name"],
            tags=[base["family"], "cdrmix"],
            model_name=metadata["name"],
            eval_results=evaluations(metadata) or None,
        )
        lines = [
            f"# {metadata['name']}, step {metadata['step']:,}",
            "",
            f"{base['name']} trained further with CDRmix, and exported for transformers with the "
            "names and layout of its files.",
            "",
            f"* {self.num_parameters:,} parameters in {_name(self.dtype)}, family {base['family']}",
            f"* trained on sequences of {self._config.training.sequence_length:,} tokens",
            f"* base: config.json and weights of digest `{base['digest']}`",
            *([f"* left out, as when it is read: {', '.join(self.dropped)}"] * bool(self.dropped)),
            "",
            *result_lines(metadata["metrics"]),
            "## Use",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            "```",
            "",
            "## Origin",
            "",
            "`training_metadata.json` names run, checkpoint, base, data and versions, "
            "`MANIFEST.json` all files with their digests: `cdrmix export --verify FOLDER` "
            "compares them. The licence of the base holds for these weights too.",
            "",
        ]
        return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hub_name(folder: Path) -> str:
    """Name of a base: that on the Hub for a folder in its cache, or else the folder's."""
    for part in folder.parts[::-1]:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return folder.name


def weights_of(reader: CheckpointFile, config: Config) -> WeightSource:
    """Weights of a run's model, all of them; those of adapters are merged into the base's.

    Raises:
        StateError: if the base of adapters is not there, or another one is.
    """
    if config.model.lora is None:
        return CheckpointWeights(reader)
    # Its files close with the source, which lasts as long as the export.
    base = base_of_adapters(reader.state, reader.path, config.model.remote_code)
    return MergedWeights(base, RunAdapters(reader, config))

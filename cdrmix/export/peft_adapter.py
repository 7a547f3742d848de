"""Low-rank adapters of a run: as a folder in PEFT's format, and merged into the base's weights.

Adapters are read from a checkpoint, so that their files are the same from any layout. Their names
are peft's own, from the model made without memory and wrapped as in training.
"""

# E experts, r rank

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cdrmix.checkpoint.base_model import (
    base_records,
    digest_of_base,
    recorded_base,
    refuse_other_base,
)
from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.files import FileRecord, read_json, write_tensors, write_text
from cdrmix.checkpoint.fragments import Span
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.weight_source import WeightSource
from cdrmix.config.schema import Config
from cdrmix.errors import StateError
from cdrmix.export.provenance import (
    CARD_FILE,
    METADATA_FILE,
    hub_name,
    metadata_text,
    model_card,
    training_metadata,
)
from cdrmix.hf.lora import Adapter, adapters_in, add_adapters
from cdrmix.hf.names import is_adapter, logical_name
from cdrmix.hf.weights import skeleton

ADAPTER_FILE = "adapter_model.safetensors"
SETTINGS_FILE = "adapter_config.json"
_USE = (
    "```python",
    "from peft import PeftModel",
    "from transformers import AutoModelForCausalLM",
    "",
    'base = AutoModelForCausalLM.from_pretrained("BASE")',
    'model = PeftModel.from_pretrained(base, "FOLDER")',
    "```",
)


class RunAdapters:
    """Adapters of one checkpoint.

    Attributes:
        config: of the run.
        base: folder, digest and family of the base, as the run recorded them.
        weights: `trained`, or `ema`, their average.
    """

    def __init__(self, reader: CheckpointFile, config: Config) -> None:
        """Wraps the model of the run on the meta device.

        Args:
            reader: the checkpoint; open as long as values are read.
            config: of the run, with `model.lora`; `model.path` has config.json of the base.
        Raises:
            ConfigError: if transformers or peft cannot make the model.
            StateError: if the checkpoint holds other adapters, or does not tell its base.
        """
        assert config.model.lora is not None, "asked for adapters alone"
        self.config = config
        self.base = recorded_base(reader.state, reader.path)
        self.weights = reader.weights
        self._reader = reader
        causal = skeleton(Path(str(config.model.path)), config.model.remote_code)
        self._model = add_adapters(causal, config.model.lora, seed=config.training.seed)
        self._shapes = {
            logical_name(name): tuple(parameter.shape)
            for name, parameter in self._model.named_parameters()
            if is_adapter(name)
        }
        check_names(reader, self._shapes)

    @cached_property
    def by_weight(self) -> dict[str, Adapter]:
        """Adapters by the logical names of the weights that they change."""
        return adapters_in(self._model)

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self._shapes.values()))

    def factor(self, name: str) -> Tensor:
        """Reads one factor by its logical name, float32."""
        return self._reader.full(name, self._reader.content_kind(name))

    def tensors(self) -> dict[str, Tensor]:
        """Reads all factors, float32, under the names that peft gives them in files."""
        from peft import get_peft_model_state_dict

        values = {
            name: self.factor(logical_name(name))
            for name, _ in self._model.named_parameters()
            if is_adapter(name)
        }
        # Without embeddings: peft would look for the base on the Hub to compare their sizes.
        named: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, state_dict=values, save_embedding_layers=False
        )
        return named

    def settings(self) -> dict[str, Any]:
        """Content of adapter_config.json."""
        values = self._model.peft_config["default"].to_dict()
        # in an order of their own: the same adapters give the same bytes
        values = {key: sorted(v) if isinstance(v, set) else v for key, v in values.items()}
        return {
            **values,
            # where peft looks for it
            "base_model_name_or_path": self.base.get("folder"),
            "inference_mode": True,
        }


def write_adapter(folder: Path, adapters: RunAdapters) -> dict[str, FileRecord]:
    """Writes both files of an adapter durably, and compares what was written with the model.

    Raises:
        StateError: if the file does not hold every adapter, whole.
        OSError: naming the file that cannot be written.
    """
    tensors = adapters.tensors()
    layout = sorted(tensors.items())
    values = (tensor for _, tensor in layout)
    records = {ADAPTER_FILE: write_tensors(folder / ADAPTER_FILE, layout, values)}
    text = json.dumps(adapters.settings(), indent=2, sort_keys=True) + "\n"
    records[SETTINGS_FILE] = write_text(folder / SETTINGS_FILE, text)
    check_adapter(folder, adapters)
    return records


def check_adapter(folder: Path, adapters: RunAdapters) -> None:
    """Compares the file of an adapter, opened anew, with the model: names, shapes and no value that
    is not finite.

    Raises:
        StateError: if it holds less, more or others.
    """
    path = folder / ADAPTER_FILE
    expected = {f"base_model.model.{name}": shape for name, shape in adapters._shapes.items()}
    found: dict[str, tuple[int, ...]] = {}
    broken = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                values = file.get_tensor(name)
                found[name] = tuple(values.shape)
                if not values.isfinite().all():
                    broken.append(name)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: cannot be read: {error}") from error
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong or broken or not found:
        named = (wrong or broken or ["no tensor"])[0]
        raise StateError(
            f"{path}: does not hold the {len(expected)} tensors of the adapters: {named} is "
            "missing, of another shape or not finite. Export an earlier checkpoint"
        )


class AdapterExport:
    """Adapters of a checkpoint, ready to be written as a folder that peft loads.

    Attributes:
        checkpoint: verified.
        dtype: of the factors in the file.
        left_out: nothing.
    """

    dtype = torch.float32
    left_out: tuple[str, ...] = ()

    def __init__(self, checkpoint: FoundCheckpoint, reader: CheckpointFile, config: Config) -> None:
        """Raises StateError as `RunAdapters`; the run has adapters."""
        self.checkpoint = checkpoint
        self._state = reader.state
        self._adapters = RunAdapters(reader, config)

    @property
    def num_parameters(self) -> int:
        return self._adapters.num_parameters

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * self.dtype.itemsize

    def write(self, folder: Path, *, max_shard_bytes: int) -> dict[str, FileRecord]:
        """Writes all files but the manifest durably; gives their records. Raises as
        `write_adapter`; the adapters are one file of any size, as peft reads them."""
        records = write_adapter(folder, self._adapters)
        metadata = training_metadata(
            self.checkpoint,
            self._state,
            self._adapters.config,
            tokenizer_digest=str(self._state.get("tokenizer")),
            left_out=self.left_out,
            weights=self._adapters.weights,
        )
        base = self._adapters.base
        metadata["base"] = {
            "name": hub_name(Path(str(base.get("folder")))),
            "family": base.get("family"),
            "digest": base["digest"],
        }
        texts = {METADATA_FILE: metadata_text(metadata), CARD_FILE: self._card(metadata)}
        return records | {name: write_text(folder / name, text) for name, text in texts.items()}

    def _card(self, metadata: dict[str, Any]) -> str:
        """Makes the text of README.md."""
        lora = self._adapters.config.model.lora
        assert lora is not None, "checked at construction"
        base = metadata["base"]
        about = [
            f"Low-rank adapters of {base['name']}, trained with CDRmix, in the format of peft.",
            "",
            f"* {self.num_parameters:,} parameters in float32, rank {lora.rank}",
            f"* base: config.json and weights of digest `{base['digest']}`",
        ]
        return model_card(
            metadata,
            about=about,
            use=_USE,
            licence="The licence of the base holds for the two together.",
            library="peft",
            tags=("lora", "cdrmix"),
            base_model=base["name"],
        )


def open_adapter(folder: Path, base: Path) -> dict[str, Any]:
    """Reads what an exported adapter says of itself, for use with a base.

    Args:
        folder: written by `AdapterExport`.
        base: folder of a Hugging Face model.
    Returns:
        Content of its training_metadata.json.
    Raises:
        StateError: if it is no such folder, or of another base.
    """
    path = folder / METADATA_FILE
    try:
        metadata: dict[str, Any] = dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"{path}: not of an exported adapter: {error}") from error
    recorded = recorded_base(metadata, folder)
    refuse_other_base(recorded, digest_of_base(base_records(base)), base)
    return metadata


class MergedWeights(WeightSource):
    """Weights of the base with the adapters of a run added, part by part."""

    def __init__(self, base: WeightSource, adapters: RunAdapters) -> None:
        self.path = base.path
        self._base = base
        self._adapters = adapters

    def names(self) -> list[str]:
        """Logical names of the base."""
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a weight."""
        return self._base.shape(name)

    def read(self, name: str, span: Span) -> Tensor:
        """Reads a span, [span.numel]: float32 of what is adapted, or as the base has it."""
        values = self._base.read(name, span)
        adapter = self._adapters.by_weight.get(name)
        if adapter is None:
            return values
        a, b = (self._adapters.factor(each) for each in (adapter.a, adapter.b))
        return values.float() + _added(adapter, a, b, span)


def _added(adapter: Adapter, a: Tensor, b: Tensor, span: Span) -> Tensor:
    """Computes what an adapter adds to a span of its weight, [span.numel]."""
    block = span.block
    offset, shape = block.offset, block.shape
    experts = 1 if adapter.num_experts is None else adapter.num_experts
    if adapter.num_experts is None:
        offset, shape = (0, *offset), (1, *shape)
    a = a.view(experts, -1, a.shape[-1])  # [E, r, in], the expert slowest
    b = b.view(b.shape[0], -1, experts)  # [out, r, E], the expert fastest
    (first, row, column), (_, rows, columns) = offset, shape
    size = rows * columns
    # of the experts alone that the span meets
    start, stop = span.start // size, -(-(span.start + span.numel) // size)
    parts = []
    for expert in range(first + start, first + stop):
        left, right = b[:, :, expert], a[expert]
        if adapter.is_transposed:
            left, right = right.T, left.T
        # rows and columns of the block alone: an expert is cut into many
        part = left[row : row + rows] @ right[:, column : column + columns]
        parts.append(part.reshape(-1))
    flat = torch.cat(parts) if parts else a.new_zeros(0)
    here = span.start - start * size
    return adapter.scale * flat[here : here + span.numel]

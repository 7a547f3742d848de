"""Export of a run of RWKX-V, in one of the formats that can hold its model."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.files import MANIFEST_FILE as CHECKPOINT_MANIFEST
from cdrmix.checkpoint.files import FileRecord, digest, write_text
from cdrmix.checkpoint.fragments import is_stage_b, part_of
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.trained_run import tokenizer_of
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.export.formats import check_format, layout, write_model
from cdrmix.export.hugging_face import model_config, parameter_shapes
from cdrmix.export.provenance import metadata_text, model_card, training_metadata

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RwkxRun:
    """A checkpoint of a run of RWKX-V, checked and ready to be written.

    Attributes:
        checkpoint: verified.
        num_parameters: of the model, tied ones counted once.
        dtype: type of the exported weights.
        left_out: parts of Stage B that the checkpoint holds and the export does not.
    """

    def __init__(
        self, checkpoint: FoundCheckpoint, reader: CheckpointFile, config: Config, format: str
    ) -> None:
        """Plans the tensors, and compares the model's with those of the checkpoint.

        Raises:
            StateError: if the format cannot hold the model, or the checkpoint is of another one.
            DataError: if its tokenizer is damaged.
        """
        check_format(format, config.model)
        self.checkpoint = checkpoint
        self.dtype = DTYPES[config.training.precision]
        self._reader = reader
        self._config = config
        self._format = format
        self._tokenizer, self._tokenizer_digest = tokenizer_of(
            checkpoint.path, reader.state, config
        )
        self._translated = model_config(config, load_tokenizer(self._tokenizer), self.dtype)
        shapes = parameter_shapes(self._translated)
        stage_b = [name for name in reader.names() if is_stage_b(name)]
        check_names(reader, shapes, others=frozenset(stage_b))
        self.left_out: tuple[str, ...] = tuple(sorted({part_of(name) for name in stage_b}))
        self.num_parameters = sum(map(math.prod, shapes.values()))
        self._targets = layout(format, self._translated, shapes, self.dtype)

    @property
    def num_bytes(self) -> int:
        return sum(target.num_bytes for target in self._targets.values())

    def write(self, folder: Path, *, max_shard_bytes: int) -> dict[str, FileRecord]:
        """Writes all files but the manifest durably; gives their records.

        Raises:
            StateError: if the weights cannot be read.
            OSError: naming the file that cannot be read or written.
        """
        records, texts = write_model(
            self._format,
            folder,
            self._reader,
            self._targets,
            self._translated,
            self._tokenizer,
            name=self._config.name,
            dtype=self.dtype,
            max_shard_bytes=max_shard_bytes,
        )
        path = self.checkpoint.path.resolve()  # its run's name, from wherever it was named
        metadata = training_metadata(
            path.parent.parent if path.parent.name == "checkpoints" else None,
            step=self.checkpoint.step,
            state=self._reader.state,
            config=self._config,
            tokenizer_digest=self._tokenizer_digest,
            manifest_digest=digest(path / CHECKPOINT_MANIFEST),
            left_out=list(self.left_out),
        )
        texts["training_metadata.json"] = metadata_text(metadata)
        texts["README.md"] = model_card(
            metadata,
            self._config,
            num_parameters=self.num_parameters,
            dtype=str(self.dtype).removeprefix("torch."),
            format=self._format,
        )
        return records | {name: write_text(folder / name, text) for name, text in texts.items()}

"""Export of a run of RWKX-V, in one of the formats that can hold its model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.files import FileRecord, write_text
from cdrmix.checkpoint.fragments import is_stage_b, part_of
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.trained_run import tokenizer_of
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.export.formats import (
    check_format_of_tokenizer,
    check_writable,
    layout,
    write_model,
)
from cdrmix.export.hugging_face import model_config, parameter_shapes
from cdrmix.export.provenance import (
    CARD_FILE,
    METADATA_FILE,
    metadata_text,
    model_card,
    training_metadata,
)
from cdrmix.planning.counts import further_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FURTHER = "mtp"  # name of the parts that predict further tokens

_LIBRARIES = {"hf": "transformers", "fla": "fla", "gguf": "gguf"}
_PROGRAMS = {
    "hf": "transformers",
    "fla": "flash-linear-attention, as its RWKV-7",
    "gguf": "readers of GGUF, as its architecture rwkv7",
}
_HF_USE = (
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)',
    'model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)',
    'inputs = tokenizer("def", return_tensors="pt")',
    "tokens = model.generate(**inputs, max_new_tokens=64)",
    "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
    "```",
    "",
    "`trust_remote_code` runs `modeling_cdrmix.py` of this folder, which needs torch and "
    "transformers alone. The tokenizer begins each text with its `bos_token`, as documents in "
    "training do. Pad on either side; padding changes nothing if `attention_mask` is given.",
)


class RwkxRun:
    """A checkpoint of a run of RWKX-V, checked and ready to be written.

    Attributes:
        checkpoint: verified.
        num_parameters: of the model, tied ones counted once.
        dtype: type of the exported weights.
        left_out: parts of Stage B, and `mtp`, that the checkpoint holds and the export does not.
    """

    def __init__(
        self, checkpoint: FoundCheckpoint, reader: CheckpointFile, config: Config, format: str
    ) -> None:
        """Plans the tensors, and compares the model's with those of the checkpoint.

        Raises:
            StateError: if the format cannot hold the model, or the checkpoint is of another one.
            DataError: if its tokenizer is damaged.
        """
        check_writable(format, config.model)
        self.checkpoint = checkpoint
        self.dtype = DTYPES[config.training.precision]
        self._reader = reader
        self._config = config
        self._format = format
        self._tokenizer, self._tokenizer_digest = tokenizer_of(
            checkpoint.path, reader.state, config
        )
        check_format_of_tokenizer(format, self._tokenizer)
        self._translated = model_config(config, load_tokenizer(self._tokenizer), self.dtype)
        shapes = parameter_shapes(self._translated)
        stage_b = {name for name in reader.names() if is_stage_b(name)}
        further = {each.name: each.shape for each in further_parameters(config.model)}
        others = stage_b.union(further)
        left_out: list[str] = sorted({part_of(name) for name in stage_b})
        if format == "hf":  # whose code has no use for them, and leaves them alone
            shapes |= further
        elif further:
            left_out.append(FURTHER)
        check_names(reader, shapes, others=others)
        self.left_out: tuple[str, ...] = tuple(left_out)
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
        metadata = training_metadata(
            self.checkpoint,
            self._reader.state,
            self._config,
            tokenizer_digest=self._tokenizer_digest,
            left_out=self.left_out,
            weights=self._reader.weights,
        )
        texts |= {METADATA_FILE: metadata_text(metadata), CARD_FILE: self._card(metadata)}
        return records | {name: write_text(folder / name, text) for name, text in texts.items()}

    def _card(self, metadata: dict[str, Any]) -> str:
        """Makes the text of README.md."""
        model = self._config.model
        kinds = model.layer_kinds()
        experts = "one dense feed-forward in each"
        if model.moe is not None:
            experts = f"{model.moe.num_experts} experts in each, {model.moe.top_k} for each token"
        dtype = str(self.dtype).removeprefix("torch.")
        about = [
            f"A language model trained with CDRmix and exported for {_PROGRAMS[self._format]}.",
            "",
            f"* {self.num_parameters:,} parameters in {dtype}, embedding and head tied",
            f"* {kinds.count('rwkv')} RWKV-7 and {kinds.count('transformer')} Transformer blocks "
            f"of width {model.hidden_size}; {experts}",
            f"* trained on sequences of {self._config.training.sequence_length:,} tokens, "
            f"vocabulary {model.vocab_size:,}",
        ]
        use = _use_lines(self._format, model.hidden_size)
        stage_b = [part for part in self.left_out if part != FURTHER]
        if stage_b:
            use += [
                "",
                f"The run has been through Stage B. Its parts ({', '.join(stage_b)}) are not "
                "here: this format holds the backbone alone.",
            ]
        if model.mtp is not None:
            ahead = f"tokens 2 to {model.mtp.num_tokens} ahead (multi-token prediction)"
            where = "are not here: this format has no place for them"
            if FURTHER not in self.left_out:
                where = "are here, under `model.mtp.`; the classes of this folder do not use them"
            use += ["", f"The parts that predict {ahead} {where}."]
        return model_card(
            metadata,
            about=about,
            use=use,
            licence="The licence of the weights is for whoever publishes them to state.",
            library=_LIBRARIES[self._format],
            tags=(*(["custom_code"] if self._format == "hf" else []), "rwkv", "cdrmix"),
        )


def _use_lines(format: str, width: int) -> list[str]:
    """Lines on the use of a model whose hidden size is `width`."""
    if format == "hf":
        return list(_HF_USE)
    widened = (
        f"The weights here are {2 * width} features wide, where the model has {width}: LayerNorm, "
        "which this format has, gives the model's RMSNorm on a residual stream of x and -x. The "
        "outputs are the same, but for the rounding of the arithmetic. Do not train them on: the "
        "halves would part."
    )
    reading = {
        "fla": "What is multiplied by a factor is in float32: load it with `dtype=torch.float32`. "
        "The tokenizer begins each text with its `bos_token`, as documents in training do.",
        "gguf": "The pre-tokenizer is named `cdrmix`, which llama.cpp does not know: none of its "
        "own cuts text into the same words. `tokenizer.huggingface.json` in the file is the whole "
        "tokenizer. A text begins with its `bos_token`, as documents in training do.",
    }
    return [widened, "", reading[format]]

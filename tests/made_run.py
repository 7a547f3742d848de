"""A run directory whose checkpoint holds random weights: what a run leaves, without training."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.config.load import load_config
from cdrmix.data.tokenizer import TOKENIZER_FILE, train_tokenizer
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.models.rwkv7 import TimeMix
from cdrmix.models.wkv7 import wkv7
from tests.checkpoints import save_checkpoint, whole
from tests.small_run import CONFIG

VOCABULARY = 320  # a tokenizer of that size is trained in a moment
SETTINGS = (
    "model.num_layers=4",
    "model.transformer_fraction=0.5",
    "model.hidden_size=64",
    "model.num_heads=2",
    f"model.vocab_size={VOCABULARY}",
    "model.moe.expert_hidden_size=64",
    "training.sequence_length=64",
)


def made_run(run_dir: Path, *settings: str, step: int = 7, more: dict[str, Tensor] | None = None):
    """Makes the run directory; returns the model whose weights it holds, in evaluation mode.

    Args:
        settings: PATH=VALUE, over those above.
        more: further tensors of the checkpoint, by logical name.
    """
    config = load_config(CONFIG, [*SETTINGS, *settings])
    model = Backbone(config.model)
    model.initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # much starts at zero, and would hide faults
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        # blocks outweigh the embedding, or the tied head would repeat the last token
        model.embedding_norm.weight.mul_(0.3)
    run_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = run_dir / TOKENIZER_FILE
    if not tokenizer.exists():
        train_tokenizer(["def f(x): return x\n"], VOCABULARY).save(str(tokenizer))
    fragments = [whole(logical_name(name), p.detach()) for name, p in model.named_parameters()]
    fragments += [whole(name, tensor) for name, tensor in (more or {}).items()]
    state = {
        "config": config.model_dump(mode="json"),
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        "loader": {"manifest_digest": "d" * 64, "split": "train", "samples_consumed": 56},
        "stage": "a",
    }
    save_checkpoint(run_dir / "checkpoints", step, fragments, state=state, rank_state={}, keep=9)
    return model.eval()


def with_backend(model: Backbone, backend: str) -> Backbone:
    """The same model with one form of the recurrence."""
    for part in model.modules():
        if isinstance(part, TimeMix):
            part.recurrence = functools.partial(wkv7, backend=backend)
    return model

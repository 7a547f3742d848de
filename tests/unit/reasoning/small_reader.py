"""A reader of random weights over a tokenizer of task texts, for tests of what uses them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.evaluation.trained import TrainedModel
from cdrmix.models.backbone import Backbone
from cdrmix.models.initialize import normal_
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.policy import Action
from cdrmix.reasoning.tasks import KINDS, generate_examples
from cdrmix.stage_b.long_context import TrainedReader

WINDOW_TOKENS = 64
TASKS = tuple(KINDS)


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte pairs of task texts, 768 tokens."""
    texts = [
        generate_examples(
            task, number=n, seed=0, length_ratio=4, window_tokens=400, count_tokens=len
        ).text
        for task in TASKS
        for n in range(10)
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / TOKENIZER_FILE).write_text(train_tokenizer(texts, 768).to_str())
        return load_tokenizer(Path(folder))


def small_config(**training: Any) -> Config:
    """The tiny reasoning variant, narrowed to two dense blocks of 64."""
    config = load_config(
        shipped("model_configs") / "cdrmix-reason-tiny.yaml",
        [
            "model.hidden_size=64",
            "model.num_heads=2",
            "model.num_layers=2",
            "model.transformer_fraction=0.5",
            "model.vocab_size=768",
            "model.moe=null",
            "stage_b.memory.summary_dim=32",
        ],
    )
    assert config.stage_b is not None, "a reasoning variant has this section"
    changed = {"texts_per_lesson": 4, "group_size": 4, "length_ratios": (1, 2), **training}
    new = config.stage_b.training.model_copy(update=changed)
    return config.model_copy(
        update={"stage_b": config.stage_b.model_copy(update={"training": new})}
    )


def small_lessons(config: Config) -> Lessons:
    """Tasks without plain text."""
    assert config.stage_b is not None, "a reasoning variant has this section"
    return Lessons(config.stage_b.training, 0, WINDOW_TOKENS, tokenizer())


def small_reader(config: Config, *, seed: int = 0) -> MemoryReader:
    """A reader whose backbone looks at what it reads, and whose slots are read."""
    assert config.stage_b is not None, "a reasoning variant has this section"
    backbone = Backbone(config.model)
    backbone.initialize(seed=seed)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if parameter.dim() == 2 and "embedding" not in name:
                normal_(parameter, parameter.shape[1] ** -0.5, seed=seed, name=name)
    reader = MemoryReader(
        backbone,
        config.stage_b,
        window_tokens=WINDOW_TOKENS,
        marks=small_lessons(config).marks,
    )
    reader.initialize(seed=seed)
    normal_(reader.memory.up.weight, 0.5, seed=seed, name="up")
    return reader.eval()


def trained_reader(
    *, favourite: Action | None = None, accept_threshold: float | None = None
) -> TrainedReader:
    """The small reader as of a checkpoint, whose agent prefers an action and accepts branches."""
    config = small_config()
    reader = small_reader(config)
    if accept_threshold is not None:
        policy = reader.config.policy.model_copy(update={"accept_threshold": accept_threshold})
        reader.config = reader.config.model_copy(update={"policy": policy})
    if favourite is not None:
        with torch.no_grad():
            reader.policy.feature_policy.bias[favourite] = 10.0
    trained = TrainedModel(config, reader.backbone, tokenizer(), "0" * 64, Path("1"), 1)
    return TrainedReader(trained, reader, small_lessons(config))

"""Plastic adapters learn to bind keys to values that have left the backbone's window.

A sequence is n x [key value noise noise], a gap of noise, then [query key]; the value is to be
named, by chance 1 in 16. The backbone, a Transformer block at random weights that are never
trained, forgets everything after two tokens; only the fast weights outlive that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import AdapterConfig
from cdrmix.models.backbone import Backbone
from cdrmix.models.initialize import normal_
from cdrmix.models.state_rows import map_tensors
from cdrmix.planning.autosize import variant
from cdrmix.reasoning.fast_weights import CLAMP_EVERY_TOKENS, Rule
from cdrmix.reasoning.hebbian import PlasticBackbone
from tools.benchmark.timing import report

NUM_KEYS = 32
NUM_VALUES = 16
NUM_NOISE = 16
QUERY = NUM_KEYS + NUM_VALUES + NUM_NOISE
WINDOW_TOKENS = 2
GAP_TOKENS = 16
BATCH_SIZE = 32
LEARNING_RATE = 2e-2
WARMUP_STEPS = 20
NUM_EVALUATED = 512


class Row(NamedTuple):
    """A row of the table: adapters of a scale, and how many pairs they should hold."""

    scale: str
    num_pairs: int
    steps: int


# by rank of the adapters
ROWS = {
    8: Row("1b", num_pairs=4, steps=500),
    12: Row("4b", num_pairs=6, steps=400),
    16: Row("40b", num_pairs=8, steps=300),
    24: Row("200b", num_pairs=12, steps=300),
}


def adapter_config(rank: int) -> AdapterConfig:
    """Rank, scale and decay as in the reasoning variant of that rank."""
    stage_b = variant("reason", ROWS[rank].scale).stage_b
    assert stage_b is not None and stage_b.adapters.rank == rank, "the variants' own settings"
    return stage_b.adapters


def frozen_backbone(seed: int) -> Backbone:
    """One block of unit gain in every projection."""
    config = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 256}
    backbone = Backbone(ModelConfig.model_validate({**config, "transformer_fraction": 1.0}))
    for name, parameter in backbone.named_parameters():
        if parameter.dim() == 2:
            normal_(parameter, parameter.shape[1] ** -0.5, seed=seed, name=name)
    return backbone.requires_grad_(False)


def make_batch(
    count: int, *, num_pairs: int, gap: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] and the value that answers each, [B]; the keys of a sequence differ."""

    def noise(*shape: int) -> Tensor:
        return torch.randint(NUM_NOISE, shape, generator=generator) + NUM_KEYS + NUM_VALUES

    keys = torch.rand(count, NUM_KEYS, generator=generator).argsort(1)[:, :num_pairs]
    values = torch.randint(NUM_VALUES, (count, num_pairs), generator=generator)
    pairs = torch.stack([keys, values + NUM_KEYS], dim=2)  # [B, n, 2]
    facts = torch.cat([pairs, noise(count, num_pairs, 2)], dim=2).flatten(1)
    asked = torch.randint(num_pairs, (count, 1), generator=generator)
    question = torch.cat([torch.full((count, 1), QUERY), keys.gather(1, asked)], dim=1)
    ids = torch.cat([facts, noise(count, gap), question], dim=1)
    return ids, values.gather(1, asked).squeeze(1)


def windows(ids: Tensor) -> Tensor:
    """Segment ids [B, T] by which the backbone forgets after two tokens."""
    return (torch.arange(ids.shape[1]) // WINDOW_TOKENS).expand_as(ids)


def answer(model: PlasticBackbone, ids: Tensor, *, plastic: bool = True) -> Tensor:
    """Scores of the values after the last token, [B, 16]."""
    state = model.start(len(ids))
    hidden = model(ids, state=state, segment_ids=windows(ids), writes=plastic).output.hidden
    return model.backbone.logits(hidden[:, -1])[:, NUM_KEYS : NUM_KEYS + NUM_VALUES]


def answer_from_another(model: PlasticBackbone, ids: Tensor) -> Tensor:
    """Scores of the values where each question meets the fast weights of another sequence."""
    facts, question = ids[:, :-WINDOW_TOKENS], ids[:, -WINDOW_TOKENS:]
    read = model(facts, state=model.start(len(ids)), segment_ids=windows(facts)).state
    hidden = model(question, state=map_tensors(read, lambda rows: rows.roll(1, 0))).output.hidden
    return model.backbone.logits(hidden[:, -1])[:, NUM_KEYS : NUM_KEYS + NUM_VALUES]


def train(rank: int, *, seed: int, steps: int, rule: Rule = "hebb") -> PlasticBackbone:
    """Adapters of a rank after `steps` batches, at gaps of 16 tokens."""
    model = PlasticBackbone(frozen_backbone(seed), adapter_config(rank), rule=rule)
    model.initialize(seed=seed)
    parameters = list(model.adapters.parameters())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rate = min((step + 1) / WARMUP_STEPS, 1, max(0.05, 2 * (1 - step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        ids, values = make_batch(
            BATCH_SIZE, num_pairs=ROWS[rank].num_pairs, gap=GAP_TOKENS, generator=generator
        )
        optimizer.zero_grad()
        F.cross_entropy(answer(model, ids), values).backward()
        nn.utils.clip_grad_norm_(parameters, model.adapter_config.gradient_clipping)
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(
    model: PlasticBackbone, rank: int, *, gap: int, scores: Callable[..., Tensor] = answer
) -> float:
    """Share of unseen sequences that are answered right by the highest of `scores`."""
    generator = torch.Generator().manual_seed(10_000)
    ids, values = make_batch(
        NUM_EVALUATED, num_pairs=ROWS[rank].num_pairs, gap=gap, generator=generator
    )
    return float((scores(model, ids).argmax(-1) == values).float().mean())


@torch.no_grad()
def largest_weight(model: PlasticBackbone, rank: int) -> float:
    """Largest magnitude of a fast weight at the last border of unseen sequences."""
    generator = torch.Generator().manual_seed(10_000)
    ids, _ = make_batch(
        NUM_EVALUATED, num_pairs=ROWS[rank].num_pairs, gap=GAP_TOKENS, generator=generator
    )
    whole = ids[:, : ids.shape[1] // CLAMP_EVERY_TOKENS * CLAMP_EVERY_TOKENS]
    after = model(whole, state=model.start(len(ids)), segment_ids=windows(whole)).state
    return max(float(layer.weights.abs().max()) for layer in after.layers.values())


def learn(rank: int, *, seed: int, steps: int | None = None, rule: Rule = "hebb") -> dict[str, Any]:
    """Accuracy of trained adapters and of their controls."""
    began = time.process_time()
    model = train(rank, seed=seed, steps=steps or ROWS[rank].steps, rule=rule)
    return {
        "trained": accuracy(model, rank, gap=GAP_TOKENS),
        "gap x8": accuracy(model, rank, gap=8 * GAP_TOKENS),
        "plastic off": accuracy(model, rank, gap=GAP_TOKENS, scores=partial(answer, plastic=False)),
        "weights of another": accuracy(model, rank, gap=GAP_TOKENS, scores=answer_from_another),
        "largest weight": largest_weight(model, rank),
        "seconds": time.process_time() - began,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Every rank, with so many seeds."""
    torch.set_num_threads(1)
    learned = [
        {"rank": rank, "pairs": row.num_pairs, "seed": seed, **learn(rank, seed=seed)}
        for rank, row in ROWS.items()
        for seed in range(rounds)
    ]
    return {"rounds": rounds, "learned": learned}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in result["learned"]:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)

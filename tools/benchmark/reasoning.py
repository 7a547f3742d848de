"""Cost of Stage B beside its backbone: operations of the memory, time per token, memory.

Everything on one thread: CPU time, variants in turn, medians. The 1B's shape is two blocks of its
width, one of each kind, with the two experts per token that are active.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
from torch import Tensor

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import StageBConfig
from cdrmix.config.schema import Config
from cdrmix.models.backbone import Backbone
from cdrmix.models.block import BlockState
from cdrmix.models.initialize import normal_
from cdrmix.models.state_rows import map_tensors
from cdrmix.planning.counts import count, stage_b_params
from cdrmix.reasoning.episodic_index import Entry, EpisodicIndex
from cdrmix.reasoning.fast_weights import FastWeights, chunks_of
from cdrmix.reasoning.hebbian import PlasticAdapter, PlasticBackbone
from cdrmix.reasoning.memory_reader import NUM_FEATURES
from cdrmix.reasoning.policy import MemoryPolicy
from cdrmix.reasoning.working_memory import RetrievalEncoder, WorkingMemory
from tools.benchmark.learn_retrieval import SIZES, latency
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report

SEGMENT_TOKENS = 64  # what is written to memory at a time
WINDOW_TOKENS = {"tiny": 64, "1b": 4096}


def shape(scale: str) -> Config:
    """A reasoning variant."""
    return load_config(shipped("model_configs") / f"cdrmix-reason-{scale}.yaml")


def stage_b_of(config: Config) -> StageBConfig:
    """Its section."""
    assert config.stage_b is not None, "a reasoning variant has this section"
    return config.stage_b


def built(scale: str) -> Backbone:
    """The whole tiny model, or two blocks of a larger one's width, with random weights."""
    model = shape(scale).model
    if scale != "tiny":
        assert model.moe is not None, "every shipped variant has experts"
        moe = model.moe.model_copy(update={"num_experts": 2, "drop_tokens": False})
        changed = {"num_layers": 2, "transformer_fraction": 0.5, "moe": moe.model_dump()}
        model = ModelConfig.model_validate({**model.model_dump(), **changed, "vocab_size": 512})
    backbone = Backbone(model).eval().requires_grad_(False)
    backbone.initialize(seed=0)
    for name, parameter in backbone.named_parameters():
        if parameter.dim() == 2:
            normal_(parameter, parameter.shape[1] ** -0.5, seed=0, name=name)
    return backbone


@torch.no_grad()
def operations(rounds: int) -> dict[str, float]:
    """Milliseconds of what is done per segment, and of one adapter's token, at the 1B's size."""
    stage_b = stage_b_of(shape("1b"))
    width = shape("1b").model.hidden_size
    slots = WorkingMemory(width, stage_b.memory)
    slots.initialize(seed=0)
    encoder = RetrievalEncoder(width, stage_b.memory.summary_dim)
    encoder.initialize(seed=0)
    policy = MemoryPolicy(width, NUM_FEATURES)
    policy.initialize(seed=0)
    adapter = PlasticAdapter(width, width, stage_b.adapters, "hebb")
    adapter.initialize(seed=0, name="adapter")
    entries = stage_b.memory.max_tokens // SEGMENT_TOKENS
    keys = torch.nn.functional.normalize(torch.randn(entries, stage_b.memory.summary_dim), dim=-1)
    index = EpisodicIndex(
        key_size=stage_b.memory.summary_dim,
        max_tokens=stage_b.memory.max_tokens,
        encoder="",
        tokenizer="",
    )
    index.restore(
        keys,
        [Entry((0,) * SEGMENT_TOKENS, 0, "", 0.0, id=place) for place in range(entries)],
        next_id=entries,
    )
    segment = torch.randn(1, SEGMENT_TOKENS, width)
    before = slots.start(1)
    token = torch.randn(1, 1, width)
    fast = FastWeights.blank(1, stage_b.adapters.rank)
    chunks = chunks_of(1, start=0, device=token.device)
    features = torch.rand(1, NUM_FEATURES)
    legal = torch.ones(1, 4, dtype=torch.bool)
    fresh = torch.nn.functional.normalize(torch.randn(1, stage_b.memory.summary_dim), dim=-1)

    def write() -> None:
        encoder.key(segment)
        index.propose(fresh[0], range(SEGMENT_TOKENS), offset=0, source="", score=0.0)

    variants = {
        "summarize": lambda: slots.write(before, segment),
        "cache_write": write,
        "retrieve": lambda: index.search(encoder.query(token[:, 0]), top_k=stage_b.memory.top_k),
        "decide": lambda: policy(token[:, 0], features, legal),
        "adapter update": lambda: adapter(
            token, token, fast, chunks=chunks, with_correlation=False
        ),
    }
    seconds = paired_cpu_seconds(variants, rounds=rounds, warmup=2)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


@torch.no_grad()
def overhead(scale: str, rounds: int) -> dict[str, float]:
    """Time per token with memory over the backbone's: reading 256 tokens, decoding one."""
    backbone = built(scale)
    plastic = PlasticBackbone(backbone, stage_b_of(shape(scale)).adapters)
    plastic.initialize(seed=0)
    slots = WorkingMemory(backbone.config.hidden_size, stage_b_of(shape(scale)).memory)
    slots.initialize(seed=0)
    ids = torch.randint(300, (8 if scale == "tiny" else 1, 256))
    start = plastic.start(len(ids))
    state = backbone(ids[:1, :64], return_state=True).state
    carried = plastic(ids[:1, :64], state=plastic.start(1), return_blocks=True).state
    token = ids[:1, :1]
    memory = slots.start(1)

    def remember() -> None:
        with slots.reading(backbone, memory):
            plastic(token, state=carried, writes=False, return_blocks=True)

    reading = paired_cpu_seconds(
        {"alone": lambda: backbone(ids), "memory": lambda: plastic(ids, state=start)},
        rounds=rounds,
    )
    decoding = paired_cpu_seconds(
        {
            "alone": lambda: backbone(token, state=state, return_state=True),
            "memory": remember,
        },
        rounds=4 * rounds,
        warmup=3,
    )
    return {
        "reading": median_ratio(reading["memory"], reading["alone"]),
        "decoding": median_ratio(decoding["memory"], decoding["alone"]),
    }


def extra_memory(scale: str) -> dict[str, float]:
    """Bytes with Stage B over those of the backbone, while one text is read.

    Weights of the whole variant as counted, in the precision of its training; state of the backbone
    for one window; fast weights, slots and a full episodic memory beside it.
    """
    config = shape(scale)
    stage_b = stage_b_of(config)
    weight_bytes = 4 if config.training.precision == "fp32" else 2
    counts = count(config.model, 256)
    more = stage_b_params(config.model, stage_b)
    weights = weight_bytes * counts.total_params
    state = _state_bytes(scale, weight_bytes)
    entries = stage_b.memory.max_tokens // SEGMENT_TOKENS
    kept = 8 * stage_b.memory.max_tokens + 4 * entries * stage_b.memory.summary_dim
    own = weight_bytes * more.total_params + 4 * (more.plastic_state + stage_b.memory.summary_dim)
    return {
        "backbone": float(weights + state),
        "memory": float(own + kept),
        "ratio": (weights + state + own + kept) / (weights + state),
    }


@torch.no_grad()
def _state_bytes(scale: str, weight_bytes: int) -> int:
    """State and cache of a window, from one block of each kind at a single token."""
    model = shape(scale).model
    backbone = built(scale)
    kinds = model.layer_kinds()
    state = backbone(torch.zeros(1, 1, dtype=torch.int64), return_state=True).state
    by_kind = {}
    for kind, block in zip(backbone.config.layer_kinds(), state, strict=True):
        by_kind[kind] = _num_values(block)
    assert all(isinstance(block, BlockState) for block in state), "a state per block"
    recurrent = 4 * by_kind["rwkv"] * kinds.count("rwkv")
    cache = weight_bytes * by_kind["transformer"] * kinds.count("transformer")
    return recurrent + cache * WINDOW_TOKENS[scale]


def _num_values(state: BlockState) -> int:
    """Numbers in all tensors of a state."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    map_tensors(state, note)
    return sum(sizes)


def measure(rounds: int) -> dict[str, Any]:
    """Operations, overheads and latencies."""
    torch.set_num_threads(1)
    scales = ("tiny", "1b")
    return {
        "rounds": rounds,
        "operations": operations(rounds),
        "overhead": {scale: overhead(scale, rounds) for scale in scales},
        "memory": {scale: extra_memory(scale) for scale in scales},
        "latency": [
            {"entries": entries, "key_size": size, **latency(entries, size, rounds=rounds)}
            for entries, size in SIZES
        ],
    }


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for name in ("operations", "overhead", "memory", "latency"):
        print(name, json.dumps(result[name], indent=1))


if __name__ == "__main__":
    report(measure, show, rounds=15, description=__doc__)

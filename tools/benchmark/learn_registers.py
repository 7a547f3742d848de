"""Working memory learns to keep what registers hold beyond the window.

Four registers are assigned twice, in the first and in the second half of the windows; the last
assignment counts. Windows are 8 tokens of pairs [register value] among noise, and the question
stands in a window of its own; the answer is one of 8 values. The backbone, one RWKV block trained
along, starts every window anew.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Backbone
from cdrmix.planning.autosize import variant
from cdrmix.reasoning.working_memory import WorkingMemory
from tools.benchmark.timing import report

NUM_REGISTERS = 4
NUM_VALUES = 8
NUM_NOISE = 16
QUERY = NUM_REGISTERS + NUM_VALUES
WINDOW_TOKENS = 8
NUM_WINDOWS = 8
TRAINED_WINDOWS = (2, 4, 8)  # in turn: short texts teach what to look for in a third of the time
SUMMARY_DIM = 256
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
NUM_EVALUATED = 512


def make_batch(
    count: int, num_windows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows [B, W, 8], the question [B, 2], and the value that answers it, [B]."""
    num_tokens = num_windows * WINDOW_TOKENS
    ids = torch.randint(NUM_NOISE, (count, num_tokens), generator=generator) + QUERY + 1
    places = num_tokens // 4  # pairs of tokens per half
    for half in range(2):
        order = torch.rand(count, places, generator=generator).argsort(1)[:, :NUM_REGISTERS]
        values = torch.randint(NUM_VALUES, (count, NUM_REGISTERS), generator=generator)
        begin = 2 * (order + half * places)
        ids.scatter_(1, begin, torch.arange(NUM_REGISTERS).expand(count, -1))
        ids.scatter_(1, begin + 1, values + NUM_REGISTERS)
    asked = torch.randint(NUM_REGISTERS, (count, 1), generator=generator)
    question = torch.cat([torch.full((count, 1), QUERY), asked], dim=1)
    windows = ids.view(count, num_windows, WINDOW_TOKENS)
    return windows, question, values.gather(1, asked).squeeze(1)


class Reader(nn.Module):
    """A backbone with working memory."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        config = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 256}
        scales = {"transformer_fraction": 0.0, "init_std_scale": 2.0}
        self.backbone = Backbone(ModelConfig.model_validate({**config, **scales}))
        self.backbone.initialize(seed=seed)
        stage_b = variant("reason", "1b").stage_b
        assert stage_b is not None, "a reasoning variant has this section"
        memory = stage_b.memory.model_copy(update={"summary_dim": SUMMARY_DIM})
        self.memory = WorkingMemory(64, memory)
        self.memory.initialize(seed=seed)

    def forward(self, windows: Tensor, question: Tensor, *, carried: bool = True) -> Tensor:
        """Scores of the values, [B, 8]; without `carried`, slots are reset at every window."""
        slots = self.memory.start(len(windows))
        for window in windows.unbind(1):
            with self.memory.reading(self.backbone, slots):
                hidden = self.backbone(window).hidden
            slots = self.memory.write(slots, hidden)
            if not carried:
                slots = self.memory.start(len(windows))
        with self.memory.reading(self.backbone, slots):
            hidden = self.backbone(question).hidden
        return self.backbone.logits(hidden[:, -1])[:, NUM_REGISTERS:QUERY]


def train(*, seed: int, steps: int) -> Reader:
    """A reader after `steps` batches."""
    reader = Reader(seed=seed)
    parameters = list(reader.parameters())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rate = min((step + 1) / WARMUP_STEPS, 1, max(0.05, 4 * (1 - step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        num_windows = TRAINED_WINDOWS[step % len(TRAINED_WINDOWS)]
        windows, question, values = make_batch(BATCH_SIZE, num_windows, generator)
        optimizer.zero_grad()
        F.cross_entropy(reader(windows, question), values).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return reader


@torch.no_grad()
def accuracy(reader: Reader, *, num_windows: int, carried: bool = True) -> float:
    """Share of unseen texts that are answered right."""
    windows, question, values = make_batch(
        NUM_EVALUATED, num_windows, torch.Generator().manual_seed(10_000)
    )
    found = reader(windows, question, carried=carried).argmax(-1)
    return float((found == values).float().mean())


def learn(*, seed: int, steps: int) -> dict[str, float]:
    """Accuracy of a trained reader and of its control."""
    began = time.process_time()
    reader = train(seed=seed, steps=steps)
    return {
        "trained": accuracy(reader, num_windows=NUM_WINDOWS),
        "4x longer": accuracy(reader, num_windows=4 * NUM_WINDOWS),
        "window alone": accuracy(reader, num_windows=NUM_WINDOWS, carried=False),
        "seconds": time.process_time() - began,
    }


def measure(rounds: int) -> dict[str, Any]:
    """So many seeds."""
    torch.set_num_threads(1)
    learned = [{"seed": seed, **learn(seed=seed, steps=500)} for seed in range(rounds)]
    return {"rounds": rounds, "learned": learned}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in result["learned"]:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)

"""Working memory learns to keep what registers hold beyond the window.

Four registers are set 64 times over eight windows; the last assignment counts. Windows are 24
tokens of pairs, eight of them [register value] and four noise, and the question stands in a window
of its own; the answer is one of 8 values. The backbone, one RWKV block trained along, starts every
window anew. Controls: slots reset at every window, and the slots of another text.
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
WINDOW_TOKENS = 24
NUM_UPDATES = 8  # of a window
NUM_WINDOWS = 8
TRAINED_WINDOWS = (2, 4, 8)  # in turn: short texts teach what to look for in a third of the time
SUMMARY_DIM = 256
STRIDE = 2  # of writing: what a stride reads goes into the slots at once, the later stride last
BATCH_SIZE = 64  # with 32 one of three seeds kept three of the four registers
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
NUM_EVALUATED = 512


def make_batch(
    count: int, num_windows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows [B, W, 24], the question [B, 2], and the value that answers it, [B]."""
    shape = (count, num_windows, WINDOW_TOKENS)
    ids = torch.randint(NUM_NOISE, shape, generator=generator) + QUERY + 1
    # Places of the updates in each window, in the order in which they are read.
    drawn = torch.rand(count, num_windows, WINDOW_TOKENS // 2, generator=generator)
    begin = 2 * drawn.argsort(2)[:, :, :NUM_UPDATES].sort(2).values
    which = torch.randint(NUM_REGISTERS, begin.shape, generator=generator)
    # Each is set in the first window, so that every question has an answer.
    which[:, 0, :NUM_REGISTERS] = torch.rand(count, NUM_REGISTERS, generator=generator).argsort(1)
    values = torch.randint(NUM_VALUES, begin.shape, generator=generator)
    ids.scatter_(2, begin, which)
    ids.scatter_(2, begin + 1, values + NUM_REGISTERS)
    asked = torch.randint(NUM_REGISTERS, (count, 1), generator=generator)
    question = torch.cat([torch.full((count, 1), QUERY), asked], dim=1)
    is_asked = which.flatten(1) == asked
    last = (is_asked * torch.arange(is_asked.shape[1])).argmax(1, keepdim=True)
    return ids, question, values.flatten(1).gather(1, last).squeeze(1)


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
        sizes = {"summary_dim": SUMMARY_DIM, "kv_summary_stride": STRIDE}
        memory = stage_b.memory.model_copy(update=sizes)
        self.memory = WorkingMemory(64, memory)
        self.memory.initialize(seed=seed)

    def forward(
        self, windows: Tensor, question: Tensor, *, carried: bool = True, others: bool = False
    ) -> Tensor:
        """Scores of the values, [B, 8].

        Without `carried` slots are reset at every window; with `others` a question is answered from
        the slots of the text before it.
        """
        slots = self.memory.start(len(windows))
        for window in windows.unbind(1):
            with self.memory.reading(self.backbone, slots):
                hidden = self.backbone(window).hidden
            slots = self.memory.write(slots, hidden)
            if not carried:
                slots = self.memory.start(len(windows))
        if others:
            slots = slots.roll(1, 0)
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
def accuracy(
    reader: Reader, *, num_windows: int, carried: bool = True, others: bool = False
) -> float:
    """Share of unseen texts that are answered right."""
    windows, question, values = make_batch(
        NUM_EVALUATED, num_windows, torch.Generator().manual_seed(10_000)
    )
    found = reader(windows, question, carried=carried, others=others).argmax(-1)
    return float((found == values).float().mean())


def learn(*, seed: int, steps: int) -> dict[str, float]:
    """Accuracy of a trained reader and of its control."""
    began = time.process_time()
    reader = train(seed=seed, steps=steps)
    return {
        "trained": accuracy(reader, num_windows=NUM_WINDOWS),
        "4x longer": accuracy(reader, num_windows=4 * NUM_WINDOWS),
        "window alone": accuracy(reader, num_windows=NUM_WINDOWS, carried=False),
        "slots of another": accuracy(reader, num_windows=NUM_WINDOWS, others=True),
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

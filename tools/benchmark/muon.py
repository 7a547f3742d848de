"""Muon beside AdamW: loss of a small byte model after equally many steps, best of a few rates.

The model is the backbone, dense and narrow, trained by the engine as a run is (float32, WSD with a
linear warm-up and a cooldown) on the bytes of Python's own sources; the loss is that of held-out
files. The control is Muon without Newton-Schulz: the momentum divided by its norm.

    python -m tools.benchmark.muon [--steps N] [--rounds SEEDS] [--json]
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import processes
from cdrmix.planning.profile import choose

Kind = Literal["adamw", "muon", "normalised"]
# Peak rates that are tried.
RATES: dict[Kind, tuple[float, ...]] = {
    "adamw": (2e-3, 4e-3, 1e-2),
    "muon": (4e-3, 1e-2, 2e-2),
    "normalised": (4e-3, 1e-2, 2e-2),
}
STEPS, BATCH, LENGTH = 90, 16, 96
_HELD_OUT = 48  # samples
_MOST_BYTES = 2_000_000


@cache
def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of Python sources for training, and those of other files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = [b"", b""]
    for number, path in enumerate(sorted(folder.glob("*.py"))):
        parts[number % 10 == 9] += path.read_bytes()
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train[:_MOST_BYTES].long(), held_out[:_MOST_BYTES].long()


def make_config(kind: Kind, rate: float, *, steps: int, seed: int) -> Config:
    """Configuration of one training."""
    return Config.model_validate(
        {
            "name": "muon",
            "model": {
                "hidden_size": 64,
                "num_layers": 2,
                "num_heads": 2,
                "vocab_size": 256,
                "moe": None,
                "transformer_fraction": 0.5,
            },
            "training": {
                "max_steps": steps,
                "seed": seed,
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
                "sequence_length": LENGTH,
                "precision": "fp32",
                "schedule": "wsd",
                "cooldown_fraction": 0.2,
                "warmup_steps": max(1, steps // 10),
                # AdamW's part of Muon keeps the rate that is best for it alone.
                "learning_rate": rate if kind == "adamw" else 4e-3,
                "min_learning_rate": 0.0,
            },
            "optimizer": {
                "kind": "adamw" if kind == "adamw" else "muon",
                "learning_rate": None if kind == "adamw" else rate,
            },
            "data": {"path": "none"},
        }
    )


def learn(kind: Kind, rate: float, *, steps: int = STEPS, seed: int = 0) -> dict[str, float]:
    """Trains in this process, whose group is there; gives the held-out loss and the time.

    The loss is in nats a byte, the time that of the steps, in seconds of CPU.
    """
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    config = make_config(kind, rate, steps=steps, seed=seed)
    plan = choose(config, processes(1), profile="zero1")
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    if kind == "normalised":
        engine.optimizer.optimizer.newton_schulz = _Normalised()
    train, held_out = corpus()
    source = torch.Generator().manual_seed(seed)
    began = time.process_time()
    for step in range(steps):
        rows = _samples(train, BATCH, source)
        batch = {"input_ids": rows[None, :, :-1], "labels": rows[None, :, 1:]}
        train_step(engine, config, topology, batch, step=step, weights=[BATCH * LENGTH])
    seconds = time.process_time() - began
    rows = _samples(held_out, _HELD_OUT, torch.Generator().manual_seed(1))
    module = engine.module.eval()
    with torch.no_grad():
        scores = module.logits(module(rows[:, :-1]).hidden)
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
    engine.destroy()
    return {"loss": float(loss), "seconds": seconds}


def _samples(text: Tensor, count: int, source: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (count,), generator=source)
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


class _Normalised:
    """Matrices divided by their norm, which is then that of an orthogonal one."""

    def __init__(self) -> None:
        self.matrices = 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.matrices += len(batch)
        norm = torch.linalg.matrix_norm(batch, keepdim=True).clamp(min=1e-12)
        return batch * (min(batch.shape[-2:]) ** 0.5 / norm)


def compare(*, steps: int = STEPS, seeds: int = 1) -> dict[str, Any]:
    """Losses and times of all rates, in this process."""
    runtime.initialize_distributed()
    rows = [
        {"kind": kind, "rate": rate, "seed": seed, **learn(kind, rate, steps=steps, seed=seed)}
        for seed in range(seeds)
        for kind, rates in RATES.items()
        for rate in rates
    ]
    runtime.destroy_distributed()
    return {"steps": steps, "rounds": seeds, "rows": rows}


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=1, help="seeds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = compare(steps=given.steps, seeds=given.rounds)
    if given.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        print(
            "{kind:10} rate {rate:g}  seed {seed}  loss {loss:.3f}  {seconds:.1f} s".format(**row)
        )


if __name__ == "__main__":
    main()

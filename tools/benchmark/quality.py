"""Held-out loss of the tiny core beside peers, and with each optimizer and objective.

All train on the same tokens of the sample corpus, with the same batch and order of samples; Mixture
of Depths for as many steps more as its training FLOPs of a token are fewer.

Each arm trains with its learning rates from the first seed, then with the best of them from the
other seeds. An arm is the tiny configuration with a few keys changed, or a model of transformers of
the same size in the same loop. Two runs at a time, one rank and one thread each. All arms take
hours; a file of the finished runs lets a later call go on.

    python -m tools.benchmark.quality --runs quality.jsonl    all arms: 500 steps, 3 seeds
    python -m tools.benchmark.quality --arms core,llama --rounds 1 --steps 200
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.load import load_config
from cdrmix.data.sample import ensure_sample
from cdrmix.network import free_port
from cdrmix.planning.counts import count

CONFIG = "model_configs/cdrmix-core-tiny.yaml"
SEEDS = (1234, 1235, 1236)
AT_A_TIME = 2


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: its changes of the tiny configuration, and learning rates."""

    changes: tuple[str, ...] = ()
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    peer: str | None = None  # model_type of transformers, in place of the core
    equal_flops: bool = False  # as many training FLOPs as the core, rather than as many steps


_WSD = ("training.schedule=wsd", "training.min_learning_rate=0.0")
ARMS: dict[str, Arm] = {
    "core": Arm(),
    "llama": Arm(peer="llama"),
    "mixtral": Arm(peer="mixtral"),
    "muon": Arm(("optimizer.kind=muon",), rates=(4e-3, 1e-2, 2e-2)),
    # The average's loss just before the cooldown stands beside that of the weights themselves.
    "wsd": Arm((*_WSD, "training.ema_decay=0.99")),
    "mtp": Arm(("model.mtp={num_tokens: 4}",)),
    "mod": Arm(("model.mod={capacity: 0.75}",), equal_flops=True),
}


def settings(arm: Arm, *, rate: float, seed: int, steps: int, base: Path | None) -> list[str]:
    """Overrides of the tiny configuration that make it a run of an arm."""
    model = [] if base is None else [f"model={{kind: hf, path: {base}}}"]
    warmup = steps * 2 // 25
    return [
        *model,
        f"training.learning_rate={rate}",
        f"training.min_learning_rate={rate / 10}",
        f"training.warmup_steps={warmup}",
        f"training.max_steps={steps}",
        f"training.seed={seed}",
        f"checkpoint.every_steps={steps}",
        f"evaluation.every_steps={max(1, steps // 5)}",
        "evaluation.final_tokens=200000",
        "evaluation.sample_tokens=0",
        "evaluation.baselines=false",
        *arm.changes,
    ]


def make_peer(folder: Path, kind: str, data: Path, seed: int) -> None:
    """Writes a model of transformers with random weights and as many parameters as the core: a
    Llama as many as the core uses for a token, a Mixtral as many in all."""
    import torch
    import transformers

    tiny = load_config(CONFIG).model
    sizes = count(tiny, 1)
    assert tiny.moe is not None, "the tiny core has experts"
    classes = {"llama": "LlamaConfig", "mixtral": "MixtralConfig"}
    shape: dict[str, Any] = {
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_heads,
        "tie_word_embeddings": True,
    }
    wanted = sizes.active_params
    if kind == "mixtral":
        shape |= {"num_local_experts": tiny.moe.num_experts, "num_experts_per_tok": tiny.moe.top_k}
        wanted = sizes.total_params

    def with_width(width: int) -> Any:
        values = {**shape, "intermediate_size": width}
        return getattr(transformers, classes[kind])(**values)

    def parameters(width: int) -> int:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(with_width(width))
        return sum(parameter.numel() for parameter in model.parameters())

    width = min(range(64, 2048, 8), key=lambda width: abs(parameters(width) - wanted))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(with_width(width))
    model.save_pretrained(folder)
    shutil.copy(data / "tokenizer.json", folder)


def steps_of(arm: Arm, steps: int) -> int:
    """Steps of an arm beside so many of the core."""
    if not arm.equal_flops:
        return steps
    core = load_config(CONFIG)
    changed = load_config(CONFIG, overrides=arm.changes)
    length = core.training.sequence_length
    ratio = count(core.model, length).train_flops_per_token
    return round(steps * ratio / count(changed.model, length).train_flops_per_token)


@dataclass(frozen=True)
class Run:
    """One training run of an arm."""

    arm: str
    rate: float
    seed: int
    steps: int  # of the core


def held_out_loss(wanted: Run) -> dict[str, float]:
    """Trains an arm once; its final held-out loss (`loss`, nats per token) and the values of the
    last evaluation before a cooldown."""
    arm = ARMS[wanted.arm]
    steps = steps_of(arm, wanted.steps)
    data = ensure_sample(4096).absolute()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        base = None
        if arm.peer is not None:
            base = folder / "base"
            make_peer(base, arm.peer, data, wanted.seed)
        run = folder / "run"
        changed = settings(arm, rate=wanted.rate, seed=wanted.seed, steps=steps, base=base)
        words = [word for each in (f"data.path={data}", *changed) for word in ("--set", each)]
        command = [
            *("env", "OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu"),
            str(Path(sys.executable).with_name("deepspeed")),
            *("--num_gpus", "1", "--master_port", str(free_port()), "--log_level", "error"),
            *("launch/train.py", "--config", CONFIG, *words, "--run-dir", str(run)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{wanted}:\n{done.stderr[-4000:]}")
        summary = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, float] = {"loss": summary["evaluation"]["loss"]}
    # The last evaluation before a cooldown of the last fifth, of the weights and of the average.
    for line in map(json.loads, lines):
        if line["step"] <= 0.8 * steps:
            found |= {key: value for key, value in line.items() if key.startswith("eval/")}
    return found


class Runs:
    """Finished runs, each trained once; in a file if one is named, so that a later call goes on."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._guard = threading.Lock()
        self._found: dict[Run, dict[str, float]] = {}
        if file is not None and file.exists():
            for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                self._found[Run(**line["run"])] = line["found"]

    def get(self, wanted: Run) -> dict[str, float]:
        """The values of a run, which is trained if it is not there yet."""
        if wanted not in self._found:
            found = held_out_loss(wanted)
            print(f"{wanted}: {found['loss']:.4f}", file=sys.stderr, flush=True)
            with self._guard:
                self._found[wanted] = found
                if self._file is not None:
                    with self._file.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps({"run": asdict(wanted), "found": found}) + "\n")
        return self._found[wanted]


def measure(
    names: Iterable[str], *, seeds: int, steps: int, middle_rate: bool, runs: Runs
) -> dict[str, Any]:
    """Held-out losses of each arm by rate at the first seed, and by seed at its best rate; of three
    rates, or of the one in the middle."""
    arms = list(names)
    rates = {name: ARMS[name].rates[1:2] if middle_rate else ARMS[name].rates for name in arms}
    with ThreadPoolExecutor(AT_A_TIME) as workers:
        first = SEEDS[0]
        scanned = {
            (name, rate): workers.submit(runs.get, Run(name, rate, first, steps))
            for name in arms
            for rate in rates[name]
        }
        by_rate = {
            name: {rate: scanned[name, rate].result()["loss"] for rate in rates[name]}
            for name in arms
        }
        best = {name: min(losses, key=losses.__getitem__) for name, losses in by_rate.items()}
        again = {
            name: [
                workers.submit(runs.get, Run(name, best[name], seed, steps))
                for seed in SEEDS[1:seeds]
            ]
            for name in arms
        }
        finished = {
            name: [scanned[name, best[name]].result(), *(each.result() for each in again[name])]
            for name in arms
        }
    return {
        "rounds": seeds,
        "steps": steps,
        "arms": [
            {
                "name": name,
                "losses_by_rate": {f"{rate:g}": loss for rate, loss in by_rate[name].items()},
                "best_rate": best[name],
                "steps": steps_of(ARMS[name], steps),
                "losses": [run["loss"] for run in finished[name]],
                "before_cooldown": [
                    {key: value for key, value in run.items() if key != "loss"}
                    for run in finished[name]
                ],
            }
            for name in arms
        ],
    }


def show(result: dict[str, Any]) -> None:
    """Prints a line for each arm."""
    for arm in result["arms"]:
        mean = statistics.mean(arm["losses"])
        print(f"{arm['name']:8} {mean:.4f} at {arm['best_rate']:g}; by seed {arm['losses']}")


def main() -> None:
    """Measures the arms that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default=",".join(ARMS), help="names, with commas between them")
    parser.add_argument("--rounds", type=int, default=len(SEEDS), help="seeds of each arm")
    parser.add_argument("--steps", type=int, default=500, help="steps of each run")
    parser.add_argument("--middle-rate", action="store_true", help="one learning rate of each arm")
    parser.add_argument("--runs", type=Path, help="file of finished runs, read and added to")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    result = measure(
        arguments.arms.split(","),
        seeds=arguments.rounds,
        steps=arguments.steps,
        middle_rate=arguments.middle_rate,
        runs=Runs(arguments.runs),
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()

"""A Hugging Face model in this trainer and in transformers' Trainer, both with DeepSpeed ZeRO-2.

Two ranks train the same tiny Llama from the same folder on the same samples in the same order, with
the same learning rates, AdamW groups and clipping. The losses of all steps are compared, and the
CPU time of a step: that of a long run less that of a short one, so that starting counts for
neither, over the tokens between. Peak memory is that of the largest rank.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.data.sample import ensure_sample
from cdrmix.network import free_port
from tools.benchmark.timing import report

RANKS = 2
SHORT = 20
LONG = SHORT + 200
CONFIG = "model_configs/cdrmix-core-tiny.yaml"
_OURS = "launch/train.py"
_THEIRS = "tools/benchmark/hf_trainer.py"


def settings(base: Path, data: Path) -> list[str]:
    """Overrides of the tiny configuration that make it a run of the model in `base`."""
    return [
        f"model={{kind: hf, path: {base}}}",
        f"data.path={data}",
        f"training.max_steps={LONG}",
        "training.global_batch_size=16",
        "training.micro_batch_size=8",
        "training.sequence_length=256",
        "training.precision=fp32",
        "training.learning_rate=1e-3",
        "training.min_learning_rate=1e-4",
        "training.warmup_steps=10",
        "training.deterministic=false",
        "evaluation.every_steps=null",
        "evaluation.final_tokens=1000",
        "evaluation.sample_tokens=0",
        "evaluation.baselines=false",
        "checkpoint.every_steps=null",
        "monitoring.log_every_steps=1",
    ]


def make_base(folder: Path, data: Path) -> None:
    """Writes a Llama of 4 layers with random weights and the tokenizer of the data set."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)
    shutil.copy(data / "tokenizer.json", folder)


class Measured:
    """A finished run: loss of each step, CPU seconds of all its processes, peak of a rank."""

    def __init__(self, command: list[str], losses_from: Path) -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [
            *("env", "OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu", f"PYTHONPATH={Path.cwd()}"),
            str(Path(sys.executable).with_name("deepspeed")),
            *("--no_local_rank", "--num_gpus", str(RANKS), "--master_port", str(free_port())),
            *("--log_level", "error", *command),
        ]
        subprocess.run(words, check=True, stdout=sys.stderr)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_seconds = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
        lines = losses_from.read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
        self.losses: list[float] = [step["loss"] for step in steps if "loss" in step]
        self.peak_bytes = max(step["memory_peak_bytes"] for step in steps)


def _ours(base: Path, data: Path, folder: Path, steps: int) -> Measured:
    words = [word for each in settings(base, data) for word in ("--set", each)]
    # The short run has a schedule of its own: its losses are not compared.
    limit = [] if steps == LONG else ["--set", f"training.max_steps={steps}"]
    command = [_OURS, "--config", CONFIG, *words, *limit, "--profile", "zero2"]
    run = folder / f"ours-{steps}"
    return Measured([*command, "--run-dir", str(run)], run / "metrics.jsonl")


def _theirs(base: Path, data: Path, folder: Path, steps: int) -> Measured:
    losses = folder / f"theirs-{steps}.jsonl"
    words = ["--base", str(base), "--data", str(data), "--steps", str(steps)]
    return Measured([_THEIRS, *words, "--losses", str(losses)], losses)


def train_with_theirs(
    base: Path, data: Path, steps: int, losses: Path, changes: Sequence[str] = ()
) -> None:
    """Runs transformers' Trainer on this rank, with more overrides of the configuration; rank 0
    writes the loss of each step."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from cdrmix.optimizers.adamw import adamw
    from cdrmix.optimizers.schedule import learning_rate

    # Both sides reduce through gloo. DeepSpeed's reduction through shared memory waits by spinning.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config: Config = load_config(CONFIG, [*settings(base, data), *changes])
    training = config.training
    rank = runtime.local_rank()
    micro = training.global_batch_size // RANKS
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_cache=False)
    optimizer = adamw(model, training)

    class SameSamples(Trainer):
        """Trainer on this rank's samples of our order, at our learning rates."""

        def get_train_dataloader(self) -> Any:
            return _Samples(config, data, rank, micro, steps)

        def create_optimizer(self, *_: object) -> torch.optim.Optimizer:
            # Under DeepSpeed the argument `optimizers` is passed over, without a word.
            self.optimizer = optimizer
            return optimizer

        def create_scheduler(self, *_: object, **__: object) -> Any:
            share = lambda step: learning_rate(step, training) / training.learning_rate  # noqa: E731
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
            return self.lr_scheduler

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            deepspeed=_zero2(micro, training.gradient_clipping),
            per_device_train_batch_size=micro,
            max_steps=steps,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            max_grad_norm=training.gradient_clipping,
            learning_rate=training.learning_rate,
        )
        trainer = SameSamples(model=model, args=arguments)
        trainer.train()
    _write_losses(trainer.state.log_history, losses)


def _zero2(micro: int, gradient_clipping: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _write_losses(history: list[dict[str, float]], losses: Path) -> None:
    """Writes the loss of each step with the peak memory of the largest rank; collective."""
    import torch

    # ru_maxrss of each rank is in KiB
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    if runtime.local_rank() == 0:
        found = [line["loss"] for line in history if "loss" in line]
        rows = [{"loss": loss, "memory_peak_bytes": int(peak)} for loss in found]
        losses.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class _Samples:
    """Batches of one rank in the order in which our loader reads them."""

    def __init__(self, config: Config, data: Path, rank: int, micro: int, steps: int) -> None:
        from cdrmix.data.loader import Loader
        from cdrmix.data.token_dataset import TokenDataset

        training = config.training
        dataset = TokenDataset(data, "train", training.sequence_length)
        self.dataset = range(steps * training.global_batch_size)  # Trainer asks for its length
        self._steps = steps
        self._loader = Loader(
            dataset,
            global_batch_size=training.global_batch_size,
            micro_batch_size=micro,
            data_rank=rank,
            data_size=RANKS,
            seed=training.seed,
            shuffle=True,
        )

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._steps):
            batch = {name: values[0] for name, values in self._loader.next().items()}
            # transformers shifts labels itself unless they are given as shifted
            yield batch | {"shift_labels": batch["labels"]}


def measure(rounds: int) -> dict[str, Any]:
    """Ratio of tokens per CPU second, largest difference of the losses, and peak memory."""
    data = ensure_sample(4096).absolute()
    ratios, rates, difference, peaks = [], [], 0.0, (0, 0)
    tokens = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            base = folder / "base"
            make_base(base, data)
            tokens = (LONG - SHORT) * load_config(
                CONFIG, settings(base, data)
            ).training.tokens_per_step
            runs = [
                (_ours(base, data, folder, steps), _theirs(base, data, folder, steps))
                for steps in (SHORT, LONG)
            ]
        ours, theirs = (
            tokens / (long.cpu_seconds - short.cpu_seconds)
            for short, long in zip(*runs, strict=True)
        )
        ratios.append(ours / theirs)
        rates.append((ours, theirs))
        pairs = zip(runs[1][0].losses, runs[1][1].losses, strict=True)
        difference = max(difference, *(abs(one - other) for one, other in pairs))
        peaks = tuple(run.peak_bytes for run in runs[1])
    return {
        "rounds": rounds,
        "tokens": tokens,
        "steps": LONG,
        "tokens_per_cpu_second": [statistics.median(side) for side in zip(*rates, strict=True)],
        "ratio": statistics.median(ratios),
        "worst_loss_difference": difference,
        "peak_bytes": list(peaks),
    }


def show(result: dict[str, Any]) -> None:
    """Prints a line per side."""
    for name, rate, peak in zip(
        ("cdrmix", "Trainer"), result["tokens_per_cpu_second"], result["peak_bytes"], strict=True
    ):
        print(f"{name:8} {rate:10,.0f} tokens per CPU second, peak {peak / 2**20:,.0f} MiB a rank")
    print(f"ratio {result['ratio']:.2f}, losses differ by {result['worst_loss_difference']:.1e}")


def main() -> None:
    """Measures, or with --base is one rank of the other side."""
    if "--base" not in sys.argv:
        report(measure, show, rounds=1, description=__doc__)
        return
    parser = argparse.ArgumentParser()
    for name in ("--base", "--data", "--losses"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    train_with_theirs(args.base, args.data, args.steps, args.losses)


if __name__ == "__main__":
    main()

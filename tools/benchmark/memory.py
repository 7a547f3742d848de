"""The plan's bytes per rank against what a run allocates, part by part.

Small models on CPU ranks: weights, gradients and optimizer are the storages that DeepSpeed holds
between two micro-steps and after a step, and host those of them that a GPU's rank would have on the
host; activations are the storages that autograd saves, seen by torch's saved-tensor hooks. Where
there is a GPU, the peak of CUDA's allocator over two steps is compared with the plan's total,
without its allowances for fragmentation and context.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.schema import Config, Recomputation
from cdrmix.planning.activations import WKVForm
from cdrmix.planning.cluster import make_cluster, processes
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from tools.benchmark.storages import (
    Rebuilt,
    Storages,
    gradient_storages,
    host_storages,
    largest_unit,
    optimizer_storages,
    saved,
    storages,
    total,
    weight_storages,
    without,
)

ACCUMULATION = 2  # a micro-step that does not end a step shows what is kept between them
PARTS = ("weights", "gradients", "optimizer", "host", "activations")


@dataclass(frozen=True)
class Case:
    """One configuration that is measured; sizes as in `ModelConfig` and `TrainingConfig`."""

    name: str
    hidden: int = 128
    length: int = 128
    micro_batch: int = 1
    layers: int = 4
    moe: bool = True
    mixed: bool = False  # layers listed, experts in every other one, SwiGLU
    capacity: float | None = None  # of Mixture of Depths with predictors, in all blocks but one
    kv_heads: int | None = None
    checkpointing: Recomputation = "none"
    span: int | None = None
    precision: str = "fp32"
    profile: str = "zero1"
    world: int = 1
    expert: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1
    mixers: tuple[str, ...] | None = None  # block types of the layers
    mtp: str | None = None  # multi-token prediction of three tokens: linear, block or deepseek
    optimizer: str = "adamw"
    averaged: bool = False  # keeps an average of the weights

    @property
    def readers(self) -> int:
        """Ranks that read samples of their own."""
        return self.world // (self.tensor * self.pipeline * self.sequence)


MAMBA = ("rwkv", "mamba", "routing_mamba", "transformer")

CASES = (
    Case("MoE"),
    Case("MoE, ZeRO-2", profile="zero2"),
    Case("MoE, long", length=512),
    Case("MoE, wide", hidden=256, layers=8),
    Case("MoE, micro batch 3, checkpointing", micro_batch=3, checkpointing="block"),
    Case("MoE, wide and long, checkpointing", hidden=256, length=384, checkpointing="block"),
    Case("dense", moe=False),
    Case("dense, grouped queries, long", moe=False, kv_heads=2, length=512),
    Case("dense, wide, checkpointing", moe=False, hidden=256, checkpointing="block"),
    Case("dense, narrow, ZeRO-2", moe=False, hidden=64, profile="zero2"),
    Case("MoE in some layers, SwiGLU", mixed=True, kv_heads=2),
    Case("MoE in some layers, SwiGLU, 2 tensor ranks, checkpointing", mixed=True, world=2, tensor=2,
         checkpointing="block"),
    Case("MoE, routed blocks", capacity=0.75, micro_batch=2),
    Case("dense, routed blocks, checkpointing", moe=False, hidden=256, capacity=0.5,
         checkpointing="block"),
    Case("MoE, bf16, routed blocks, 2 tensor ranks", precision="bf16", capacity=0.75, world=2,
         tensor=2),
    Case("MoE, bf16, ZeRO-1", precision="bf16"),
    Case("MoE, bf16, ZeRO-2, checkpointing", precision="bf16", profile="zero2",
         checkpointing="block"),
    Case("MoE, 2 ranks, ZeRO-1", world=2),
    Case("MoE, 2 ranks, ZeRO-2", world=2, profile="zero2"),
    Case("MoE, 2 ranks, experts spread, ZeRO-2", world=2, profile="zero2", expert=2, length=512),
    Case("dense, 2 ranks, ZeRO-2", world=2, profile="zero2", moe=False, hidden=256),
    Case("MoE, bf16, 2 ranks, ZeRO-1", precision="bf16", world=2),
    Case("MoE, bf16, 2 ranks, experts spread, ZeRO-2", precision="bf16", world=2,
         profile="zero2", expert=2, length=512),
    Case("MoE, 2 tensor ranks, ZeRO-1", world=2, tensor=2),
    Case("dense, 2 tensor ranks, grouped queries, ZeRO-2", world=2, tensor=2, moe=False, kv_heads=2,
         length=512, profile="zero2"),
    Case("dense, 2 tensor ranks, wide, checkpointing", world=2, tensor=2, moe=False, hidden=256,
         checkpointing="block"),
    Case("MoE, bf16, 2 tensor x 2 data ranks, experts spread, ZeRO-2", precision="bf16", world=4,
         tensor=2, expert=2, profile="zero2", length=512),
    Case("MoE, spans of a long sequence", length=512, checkpointing="spans", span=128),
    Case("dense, wide, spans, micro batch 2", moe=False, hidden=256, micro_batch=2, length=256,
         checkpointing="spans", span=100),
    Case("MoE, bf16, spans", precision="bf16", length=512, checkpointing="spans", span=64),
    Case("MoE, selective", checkpointing="selective"),
    Case("dense, wide and long, selective", moe=False, hidden=256, length=384,
         checkpointing="selective"),
    Case("MoE in some layers, SwiGLU, 2 tensor ranks, selective", mixed=True, world=2, tensor=2,
         checkpointing="selective"),
    Case("MoE, 2 ranks, experts spread, ZeRO-2, selective", world=2, profile="zero2", expert=2,
         length=512, checkpointing="selective"),
    Case("MoE, bf16, selective", precision="bf16", checkpointing="selective"),
    Case("MoE, routed blocks, selective", capacity=0.75, micro_batch=2, checkpointing="selective"),
    Case("MoE, 2 ranks, sequence by heads, selective", world=2, sequence=2, length=32,
         micro_batch=4, checkpointing="selective"),
    Case("MoE, 2 ranks, sequence by states, selective", world=2, sequence=2, length=512,
         checkpointing="selective"),
    Case("dense, 2 ranks, ZeRO-3, selective", world=2, moe=False, hidden=384, profile="zero3",
         checkpointing="selective"),
    Case("Mamba, dense, selective", moe=False, mixers=MAMBA, length=512,
         checkpointing="selective"),
    Case("dense, deepseek depths, selective", moe=False, mtp="deepseek",
         checkpointing="selective"),
    Case("MoE, 2 ranks, sequence by heads", world=2, sequence=2, length=32, micro_batch=4),
    Case("MoE, 2 ranks, sequence by states", world=2, sequence=2, length=512),
    Case("MoE, bf16, 2 ranks, sequence by states", world=2, sequence=2, precision="bf16",
         length=512),
    Case("dense, 4 ranks, sequence 4 by states", moe=False, world=4, sequence=4, length=512),
    Case("MoE, 2 ranks, sequence, checkpointing", world=2, sequence=2, length=512,
         checkpointing="block"),
    Case("MoE, 2 ranks, sequence, spans", world=2, sequence=2, length=512, checkpointing="spans",
         span=64),
    Case("dense, ZeRO-3", moe=False, profile="zero3"),
    Case("dense, 2 ranks, ZeRO-3", world=2, moe=False, hidden=384, profile="zero3"),
    Case("dense, bf16, 2 ranks, ZeRO-3", world=2, moe=False, precision="bf16", profile="zero3"),
    Case("dense, 2 ranks, ZeRO-3 offloaded", world=2, moe=False, hidden=384,
         profile="zero3_offload"),
    Case("dense, bf16, ZeRO-3 offloaded", moe=False, precision="bf16", profile="zero3_offload"),
    Case("dense, ZeRO-2 offloaded", moe=False, profile="zero2_offload"),
    Case("MoE, 2 ranks, experts spread, ZeRO-2 offloaded", world=2, expert=2, length=512,
         profile="zero2_offload"),
    Case("MoE, bf16, 2 ranks, ZeRO-2 offloaded", world=2, precision="bf16",
         profile="zero2_offload"),
    Case("Mamba, dense, long", moe=False, mixers=MAMBA, length=512),
    Case("Mamba, bf16, checkpointing", precision="bf16", mixers=MAMBA, checkpointing="block"),
    Case("Mamba, spans, micro batch 2", mixers=MAMBA, length=512, checkpointing="spans", span=64,
         micro_batch=2),
    Case("MoE, linear heads of further tokens", mtp="linear"),
    Case("dense, bf16, heads of further tokens with blocks", moe=False, precision="bf16",
         mtp="block"),
    Case("MoE, 2 ranks, deepseek depths, ZeRO-2", world=2, profile="zero2", mtp="deepseek"),
    Case("dense, 2 tensor ranks, deepseek depths, checkpointing", world=2, tensor=2, moe=False,
         checkpointing="block", mtp="deepseek"),
    Case("MoE, Muon, 2 ranks, experts spread, ZeRO-2", world=2, expert=2, profile="zero2",
         optimizer="muon"),
    Case("MoE, bf16, Muon, ZeRO-1", precision="bf16", optimizer="muon"),
    Case("dense, Muon, 2 ranks, ZeRO-3 offloaded", world=2, moe=False, hidden=384,
         profile="zero3_offload", optimizer="muon"),
    Case("MoE, bf16, 2 ranks, experts spread, ZeRO-1, averaged", precision="bf16", world=2,
         expert=2, averaged=True),
    Case("dense, 2 ranks, ZeRO-3, averaged", world=2, moe=False, profile="zero3", averaged=True),
    Case("MoE, ZeRO-2 offloaded, averaged", profile="zero2_offload", averaged=True),
)  # fmt: skip

ONE_GPU = make_cluster(nodes=1, gpus_per_node=1, gpu="a100-80")  # what holds for any
CUDA_CASES = tuple(
    Case(name, hidden=2048, length=4096, precision="bf16", profile="zero2", **changes)
    for name, changes in (
        ("MoE", {}),
        ("MoE, checkpointing", {"checkpointing": "block", "micro_batch": 4}),
        ("dense", {"moe": False}),
    )
)


def make_config(case: Case) -> Config:
    """A whole configuration of a case; nothing of it is read from disk."""
    experts: dict[str, Any] = {"num_experts": 4, "expert_hidden_size": 3 * case.hidden // 2}
    listed: dict[str, Any] = {}
    if case.mixed:
        experts["layers"] = list(range(1, case.layers, 2))
        mixers = [f"rwkv*{case.layers - 1}", "transformer"]
        listed = {"mixers": mixers, "ffn_activation": "swiglu"}
    return Config.model_validate(
        {
            "name": "memory",
            "model": {
                "hidden_size": case.hidden,
                "num_layers": case.layers,
                "num_heads": case.hidden // 32,
                "num_kv_heads": case.kv_heads,
                "vocab_size": 512,
                "moe": experts if case.moe else None,
                "mod": case.capacity and {"capacity": case.capacity, "mode": "topk"},
                **listed,
                **({"mixers": case.mixers} if case.mixers else {}),
                "mtp": case.mtp and _further_tokens(case.mtp),
            },
            "parallel": {
                "expert": case.expert,
                "tensor": case.tensor,
                "sequence": case.sequence,
                "pipeline": case.pipeline,
            },
            "training": {
                "max_steps": 2,
                "global_batch_size": case.micro_batch * case.readers * ACCUMULATION,
                "micro_batch_size": case.micro_batch,
                "sequence_length": case.length,
                "precision": case.precision,
                "activation_checkpointing": case.checkpointing,
                "sequence_checkpoint_tokens": case.span,
                "learning_rate": 1e-3,
                "min_learning_rate": 1e-4,
                "warmup_steps": 1,
                "ema_decay": 0.9 if case.averaged else None,
            },
            "optimizer": {"kind": case.optimizer},
            "data": {"path": "none"},
        }
    )


def _further_tokens(kind: str) -> dict[str, Any]:
    """The section mtp of a model that predicts three tokens."""
    if kind == "deepseek":
        return {"kind": kind, "num_tokens": 3}
    return {"kind": "independent", "num_tokens": 3, "head": kind}


def wkv_form() -> WKVForm:
    """Form of the WKV-7 op that CPU ranks of this machine take."""
    from cdrmix.models.wkv7_cpu import load_kernel

    return "chunked" if isinstance(load_kernel(), str) else "cpp"


def predicted(case: Case) -> dict[str, int]:
    """The plan's figures for a case on CPU ranks."""
    config = make_config(case)
    made = choose(config, processes(case.world), profile=case.profile)
    memory = MemoryModel(config, "cpu", wkv=wkv_form()).estimate(made)
    return memory.to_json() | {"host": memory.host}


def measured(fields: dict[str, Any]) -> dict[str, int]:
    """Measures the memory of this rank for a case; all its ranks call this."""
    from cdrmix.engines.combination import FurtherLabels
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import micro_step
    from cdrmix.optimizers.average import keep_average
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    case = Case(**fields)
    runtime.initialize_distributed()
    config = make_config(case)
    plan = choose(config, processes(case.world), profile=case.profile)
    plan = with_small_buckets(plan)
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    if config.training.ema_decay is not None:
        keep_average(engine, config.training.ema_decay)
    torch.manual_seed(topology.data_rank)
    ids = torch.randint(0, 512, (case.micro_batch, case.length // case.sequence))

    further = None
    if config.model.mtp is not None:
        targets = ids.unsqueeze(-1).expand(*ids.shape, config.model.mtp.num_tokens)
        labels = targets[..., 1:].clone()
        further = FurtherLabels(engine.module, targets, labels, [0.5, 0.5], None)

    def forward() -> Tensor:
        known = (engine, config, topology, ids, ids.clone())
        return micro_step(*known, nats_scale=1e-3, further=further).loss

    if plan.zero_stage == 3:  # learns which modules follow, and makes whole what stays so
        for _ in range(ACCUMULATION):
            engine.backward(forward())
            engine.step()
    weights = weight_storages(engine)
    kept, loss = saved(forward, known=weights)
    gathered = storages(engine.module.parameters())
    kept = {key: piece for key, piece in kept.items() if key not in gathered}
    if case.checkpointing in ("block", "spans"):
        kept |= largest_unit(forward, known=weights)
    found = {"activations": total(kept)}
    rebuilt = Rebuilt(known=weights | gathered | kept)
    del kept
    rebuilt.run(lambda: engine.backward(loss))
    found["activations"] += rebuilt.most
    gradients = gradient_storages(engine)
    found["gradients"] = total(without(gradients, host_storages(engine)))
    engine.step()
    engine.backward(forward())
    engine.step()
    host = host_storages(engine)
    found["weights"] = total(without(weights, host))
    found["optimizer"] = total(without(optimizer_storages(engine), host))
    found["host"] = total(host)
    runtime.destroy_distributed()
    return found


def with_small_buckets(plan: Plan) -> Plan:
    """Buckets of a million elements: the shipped ones take a gigabyte on each rank."""
    small = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    zero = plan.deepspeed["zero_optimization"] | small
    return replace(plan, deepspeed=plan.deepspeed | {"zero_optimization": zero})


def largest_block(blocks: Iterable[torch.nn.Module], case: Case, *, known: Storages) -> Storages:
    """Bytes saved by the largest block when it is recomputed, without its inputs."""
    most: Storages = {}
    for block in blocks:
        dtype = next(block.parameters()).dtype
        x = torch.randn(case.micro_batch, case.length, case.hidden, dtype=dtype)
        x.requires_grad_()
        creates = getattr(block.mixer, "creates_v_first", False)
        heads = x.detach()[..., : case.hidden // case.tensor].clone().requires_grad_()
        v_first = None if creates else heads
        inputs = storages([x, v_first])
        kept, _ = saved(lambda: block(x, v_first)[0], known=known | inputs)  # noqa: B023
        most = max(most, kept, key=total)
    return most


def compare(case: Case) -> dict[str, Any]:
    """Predicted and measured bytes of a case: states of the fullest rank, mean activations."""
    from tests.harness import run_ranks
    from tools.benchmark import memory  # by a name that ranks can import, as a script too

    ranks = run_ranks(memory.measured, case.world, asdict(case))
    found = {part: max(rank[part] for rank in ranks) for part in PARTS}
    # which rank's experts are in demand is chance: the plan's buffers allow for it, not its mean
    found["activations"] = sum(rank["activations"] for rank in ranks) // case.world
    return {"case": asdict(case), "predicted": predicted(case), "measured": found}


def predicted_peak(case: Case) -> int:
    """The plan's figure for what CUDA's allocator hands out at most."""
    config = make_config(case)
    memory = choose(config, ONE_GPU, profile=case.profile).memory
    assert memory is not None, "what is chosen is estimated"
    return memory.total - memory.buffers["fragmentation"] - memory.buffers["context"]


def measured_peak(case: Case) -> int:
    """Peak of CUDA's allocator over two steps of this process, the only rank."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import micro_step
    from cdrmix.optimizers.average import keep_average
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    runtime.initialize_distributed()
    config = make_config(case)
    plan = choose(config, ONE_GPU, profile=case.profile)
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    if config.training.ema_decay is not None:
        keep_average(engine, config.training.ema_decay)
    ids = torch.randint(0, 512, (case.micro_batch, case.length), device=engine.device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2 * ACCUMULATION):
        engine.backward(
            micro_step(engine, config, topology, ids, ids.clone(), nats_scale=1e-3).loss
        )
        engine.step()
    peak = torch.cuda.max_memory_allocated()
    runtime.destroy_distributed()
    return peak


def compare_on_cuda() -> list[dict[str, Any]] | None:
    """Predicted and measured peak of each CUDA case, each in a process of its own."""
    if not torch.cuda.is_available():
        return None
    from tests.harness import rank_environment, reserved_port

    rows = []
    for place, case in enumerate(CUDA_CASES):
        with reserved_port() as port:
            variables = [f"{name}={value}" for name, value in rank_environment(0, 1, port).items()]
            script = [sys.executable, "-m", "tools.benchmark.memory", "--cuda-case", str(place)]
            done = subprocess.run(
                ["env", *variables, *script], stdout=subprocess.PIPE, text=True, check=True
            )
        peak = int(done.stdout.splitlines()[-1])
        rows.append({"case": asdict(case), "predicted": predicted_peak(case), "measured": peak})
    return rows


def measure(most_ranks: int | None = None) -> dict[str, Any]:
    """All cases, or those of at most so many ranks; `cuda` is None where there is no GPU."""
    chosen = [case for case in CASES if most_ranks is None or case.world <= most_ranks]
    left_out = [case.name for case in CASES if case not in chosen]
    rows = [compare(case) for case in chosen]
    return {"rounds": 1, "rows": rows, "left_out": left_out, "cuda": compare_on_cuda()}


def peak_lines(rows: list[dict[str, Any]] | None) -> list[str]:
    """The comparison on a GPU, a line for each case."""
    if rows is None:
        return ["CUDA allocator's peak: not measured here"]
    return [
        f"CUDA allocator's peak, {row['case']['name']}: {row['measured'] / 2**30:.2f} GiB, "
        f"the plan is off by {row['predicted'] / row['measured'] - 1:+.1%}"
        for row in rows
    ]


def main() -> None:
    """Print a line per case and part, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--most-ranks", type=int, help="leave out cases of more ranks than that")
    parser.add_argument("--cuda-case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cuda_case is not None:
        print(measured_peak(CUDA_CASES[args.cuda_case]))
        return
    result = measure(args.most_ranks)
    if args.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        print(row["case"]["name"])
        for part in PARTS:
            guess = row["predicted"][part]
            found = row["measured"][part]
            if found:
                print(f"  {part:12} {guess:12,} {found:12,} {guess / found - 1:+8.2%}")
    print("\n".join(peak_lines(result["cuda"])))


if __name__ == "__main__":
    main()

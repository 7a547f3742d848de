"""Muon in DeepSpeed's engines: against a plain form, against DeepSpeed's own, faults, resuming.

The layouts of whole models are rows of tests/distributed/test_layouts.py. Cases of one world size
share their processes.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.store import find_newest
from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.schema import ParallelConfig
from cdrmix.errors import StateError
from tests import small_run
from tests.checked_step import checked_step
from tests.checkpoints import save_checkpoint
from tests.harness import run_ranks
from tests.layouts import Case, make_config, run_steps, start, wake_blocks
from tests.small_run import arguments, overrides

STEPS, BATCH, IN, OUT, EXPERTS = 4, 8, 24, 48, 3
RATE, DECAY, CLIPPING = 0.02, 0.1, 0.05
HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
# Stage, micro-steps, on the host, bf16 weights beside float32 masters.
CASES = [
    (stage, accumulation, host) for stage in (1, 2, 3) for accumulation in (1, 4) for host in (0, 1)
]


class Net(nn.Module):
    """Two matrices, a stack of three and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(IN, OUT)
        self.b = nn.Linear(OUT, IN)
        self.experts = nn.Parameter(torch.randn(EXPERTS, OUT, IN) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = torch.tanh(self.a(x)) + torch.einsum("bi,eoi->bo", x, self.experts)
        return ((self.b(inner) - y) ** 2).mean()


def samples(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, IN, generator=source), torch.randn(BATCH, IN, generator=source)


def settings(stage: int, accumulation: int, host: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, **(HOST if host else {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    zero["reduce_scatter"] = stage != 3
    return {
        "train_micro_batch_size_per_gpu": BATCH // accumulation // runtime.world_size(),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def weights_after(engine: Any) -> tuple[list[list[Any]], list[float]]:
    """Final weights as numbers, and the gradient norm that the engine reports of each step."""
    accumulation = engine.gradient_accumulation_steps()
    norms = []
    for step in range(STEPS):
        x, y = (
            each.chunk(runtime.world_size())[runtime.rank()].chunk(accumulation)
            for each in samples(step)
        )
        kind = next(engine.module.parameters()).dtype
        for inputs, targets in zip(x, y, strict=True):
            engine.backward(engine(inputs.to(kind), targets.to(kind)))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    import deepspeed

    found = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append(parameter.detach().float().tolist())
    return found, norms


def ours(
    stage: int, accumulation: int, host: int, *, is_fp16: bool = False
) -> tuple[list[list[Any]], list[float]]:
    from deepspeed.accelerator import get_accelerator

    from cdrmix.engines.stage_a_optimizer import join
    from cdrmix.optimizers.muon import Muon

    config = make_config(Case(moe=False, optimizer="muon"))
    training = config.training.model_copy(
        update={"gradient_clipping": CLIPPING, "epsilon": 1e-8, "weight_decay": DECAY}
    )
    model = Net()
    groups = [
        {"name": name, "params": params, "is_muon": is_muon, "decay": DECAY, "lr": RATE}
        for name, is_muon, params in (
            ("matrices", True, [p for p in model.parameters() if p.dim() > 1]),
            ("others", False, [p for p in model.parameters() if p.dim() == 1]),
        )
    ]
    optimizer = Muon(groups, OptimizerConfig(kind="muon", scale="spectral"), training)
    deepspeed = runtime.import_deepspeed()
    given = settings(stage, accumulation, host)
    if is_fp16:  # which DeepSpeed 0.19.8 refuses on CPUs, where torch computes it all the same
        get_accelerator().is_fp16_supported = lambda: True
        given["fp16"] = {"enabled": True, "loss_scale": 1024}
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    join(engine, optimizer, config)
    for group in engine.optimizer.param_groups:
        group["lr"] = RATE
    found = weights_after(engine)
    matrices = optimizer.history()["norms"]
    assert all(0 < ours <= whole for ours, whole in zip(matrices, found[1], strict=True))
    own = torch.tensor(float(optimizer.newton_schulz.matrices))
    assert runtime.all_reduce_sum(own) == STEPS * (2 + EXPERTS), "once a step, on one rank"
    return found


def deepspeeds_own() -> list[list[Any]]:
    """Weights that DeepSpeed's MuonWithAuxAdam comes to under ZeRO-2, in float32."""
    deepspeed = runtime.import_deepspeed()
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    original_muon.ns_compute_dtype = lambda _="gram": torch.float32
    model = Net()
    groups: list[dict[str, Any]] = []
    for parameter in model.parameters():
        parameter.use_muon = parameter.dim() > 1  # type: ignore[attr-defined]
    for is_muon in (True, False):
        members = [p for p in model.parameters() if (p.dim() > 1) == is_muon]
        kind = {"momentum": 0.95, "ns_method": "standard", "weight_decay": DECAY}
        if not is_muon:
            kind = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        groups.append({"params": members, "lr": RATE, "use_muon": is_muon, **kind})
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=MuonWithAuxAdam(groups), config=settings(2, 1, 0)
        )
    return weights_after(engine)[0]


def compare() -> dict[str, Any]:
    runtime.initialize_distributed()
    found = {str(case): ours(*case) for case in CASES}
    found["fp16"] = ours(2, 1, 0, is_fp16=True)
    theirs = deepspeeds_own() if runtime.world_size() == 2 else None
    runtime.destroy_distributed()
    return {"ours": found, "theirs": theirs}


def plain(clipping: float) -> tuple[list[Tensor], list[float]]:
    """The same four steps in plain torch."""
    from tests.unit.optimizers.test_muon import orthogonal

    model = Net()
    momenta = {p: torch.zeros_like(p) for p in model.parameters() if p.dim() > 1}
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(vectors, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        model(*samples(step)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([each.norm() for each in gradients]).norm()))
        nn.utils.clip_grad_norm_(vectors, clipping)
        adamw.step()
        with torch.no_grad():
            for weight, momentum in momenta.items():
                assert weight.grad is not None
                momentum.lerp_(weight.grad, 0.05)
                followed = weight.grad.lerp(momentum, 0.95)
                *_, rows, columns = weight.shape
                stack = followed.view(-1, rows, columns)
                update = torch.stack([orthogonal(each) for each in stack]).view_as(weight)
                factor = max(1.0, rows / columns) ** 0.5
                weight.mul_(1 - RATE * DECAY).add_(update, alpha=-RATE * factor)
    return [p.detach() for p in model.parameters()], norms


def largest(found: list[list[Any]], right: list[Tensor]) -> float:
    return max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_and_the_host_equal_a_plain_form(world: int) -> None:
    (found, *_) = run_ranks(compare, world)
    right, norms = plain(CLIPPING)
    # Under a loss scale of 1024, with which the norms would be off by that.
    weights, reported = found["ours"].pop("fp16")
    assert largest(weights, right) < 5e-3
    assert reported == pytest.approx(norms, rel=1e-2)
    for case, (weights, reported) in found["ours"].items():
        assert largest(weights, right) < 1e-6, case
        # The true norm of all gradients, before anything is clipped or orthogonalised.
        assert reported == pytest.approx(norms, rel=1e-5), case
    if found["theirs"] is not None:  # which does not clip here
        assert largest(found["theirs"], plain(1e9)[0]) < 1e-6
        assert largest(found["theirs"], right) > 1e-4, "clipping must show"


SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 2}
CASE = Case(data=2, expert=2, optimizer="muon", model=SMALL)


def planted(fault: str) -> str | None:
    """Message of the first step with a fault in this process; None where it passes."""
    from cdrmix.optimizers import groups, newton_schulz

    case = CASE
    if fault == "bf16":
        case = replace(CASE, training={"precision": "bf16"})
    product_type = newton_schulz.product_type
    if fault.startswith("as on a GPU"):  # with gradients of twenty tokens, and so of low rank
        newton_schulz.product_type = lambda _: torch.bfloat16
        case = replace(CASE, length=8, settings={"neuron_norm": "normed" in fault})
    if fault == "blockwise":
        case = Case(tensor=2, optimizer="muon", model=SMALL, settings={"tensor": "blockwise"})
    if fault == "neuron norm":
        case = replace(CASE, settings={"neuron_norm": True, "newton_schulz": "quintic"})
    takes_muon = groups.takes_muon
    if fault == "tags cleared":
        groups.takes_muon = lambda parameter, _: takes_muon(parameter, _) and parameter.layer != 0
    started = start(case)
    groups.takes_muon = takes_muon
    engine, optimizer = started.engine, started.engine.optimizer.optimizer
    if fault == "clipped":
        engine.optimizer.clip_grad = 0.01
    if fault == "every micro-step":
        backward = engine.backward

        def orthogonalise_too(loss: Tensor) -> None:
            backward(loss)
            optimizer.newton_schulz(torch.randn(1, 4, 4))

        engine.backward = orthogonalise_too
    if fault in ("other momentum", "other scale"):
        changes = {"momentum": 0.5} if "momentum" in fault else {"scale": "unit_rms"}
        optimizer.settings = optimizer.settings.model_copy(update=changes)
    if fault == "plain momentum":

        class Nothing:
            matrices = 0

            def __call__(self, batch: Tensor) -> Tensor:
                self.matrices += len(batch)
                return batch / batch.norm(dim=(1, 2), keepdim=True) * 4

        optimizer.newton_schulz = Nothing()
    # Degrees are the plan's, and need not stand in a configuration.
    config = started.config.model_copy(update={"parallel": ParallelConfig()})
    try:
        with checked_step(engine, config, tensor_ranks=started.topology.degrees.tensor):
            run_steps(started, count=1)
    except StateError as error:
        return str(error)
    finally:
        newton_schulz.product_type = product_type
    return None


FAULTS = {
    "": None,
    "bf16": None,
    "neuron norm": None,
    "tags cleared": "of the .* elements that are for it",
    "clipped": "DeepSpeed changed the gradient",
    "every micro-step": "were orthogonalised in a step, and there are",
    "as on a GPU": None,
    "as on a GPU, normed": None,
    "plain momentum": "Newton-Schulz's result is off by",
    "other momentum": "Newton-Schulz was given a matrix of norm",
    "other scale": "the step has a norm of .* is right, and a cosine of 1.0000",
}


def plant_all(faults: list[str]) -> dict[str, str | None]:
    runtime.initialize_distributed()
    wake_blocks()
    found = {fault: planted(fault) for fault in faults}
    runtime.destroy_distributed()
    return found


def test_the_check_of_the_first_step_notices_faults() -> None:
    import re

    for found in run_ranks(plant_all, 2, list(FAULTS)):
        for fault, pattern in FAULTS.items():
            message = found[fault]
            if pattern is None:
                assert message is None, f"{fault}: {message}"
            else:
                assert message is not None, fault
                assert re.search(pattern, message), message


def blockwise() -> tuple[str | None, dict[str, Any], float]:
    """Message of the check, and the table of parameters with the matrices orthogonalised."""
    from cdrmix.engines.stage_a_optimizer import parameter_table

    runtime.initialize_distributed()
    wake_blocks()
    message = planted("blockwise")
    case = Case(tensor=2, optimizer="muon", model=SMALL, settings={"tensor": "blockwise"})
    started = start(case)
    run_steps(started, count=1)
    done = torch.tensor(float(started.engine.optimizer.optimizer.newton_schulz.matrices))
    table = parameter_table(started.engine, started.config)
    total = float(runtime.all_reduce_sum(done))
    runtime.destroy_distributed()
    return message, table, total


def test_tensor_ranks_orthogonalise_their_parts_where_that_is_asked_for() -> None:
    # In processes of its own: DeepSpeed keeps one layout of tensor ranks for a process.
    for message, table, orthogonalised in run_ranks(blockwise, 2):
        assert message is None
        rows = {name: row for name, row in table.items() if row["optimizer"] == "muon"}
        assert sum(row["matrices"] for row in rows.values()) == orthogonalised
        # Of 64 x 64, cut in two; and four experts, which tensor ranks share out whole.
        (key,) = (row for name, row in rows.items() if name.endswith("0.mixer.key.weight"))
        assert (key["matrices"], key["factor"]) == (2, pytest.approx(0.2 * 64**0.5))
        assert {row["matrices"] for name, row in rows.items() if "experts" in name} == {4}


def test_tensor_ranks_that_the_plan_chooses_pass_the_check(
    small_corpus: Path, run_dir: Path
) -> None:
    settings = ["optimizer.kind=muon", "optimizer.tensor=blockwise", "training.global_batch_size=1"]
    settings += ["parallel.sequence=1", "parallel.pipeline=1", "training.max_steps=1"]
    argv = arguments(small_corpus, run_dir, *overrides(settings))
    assert run_ranks(small_run.start, 2, argv) == [0, 0]
    assert json.loads((run_dir / "plan.json").read_text())["degrees"]["tensor"] == 2
    assert "muon: checked: each of" in (run_dir / "train.log").read_text()


# With experts: several rows of one stack are on a rank, each with an owner of its own.
RESUMED = Case(
    data=2, profile="zero2", optimizer="muon", model=SMALL, settings={"neuron_norm": True}
)


def state_of(engine: Any) -> dict[str, Any]:
    """Bits of this rank's masters, momenta and mean squares."""
    from cdrmix.models.backbone import logical_name

    return {
        f"{each.name} {each.kind} {each.span}": each.values.numpy().tobytes()
        for each in engine_state.fragments(engine, logical_name)
    }


def save_and_go_on(folder: str) -> tuple[Any, Any, Any]:
    runtime.initialize_distributed()
    wake_blocks()
    started = start(RESUMED)
    save(started, Path(folder) / "untrained", 0)
    run_steps(started, count=3)
    begun = state_of(started.engine)
    save(started, Path(folder), 3)
    ended = go_on(started)
    again = resume(folder, RESUMED)
    # Back to before the first step, which has no state of the optimizer.
    load(started, Path(folder) / "untrained")
    untrained = state_of(started.engine)
    run_steps(started, count=3)
    begun_again = state_of(started.engine)
    runtime.destroy_distributed()
    return (ended, begun), (again, begun_again), untrained


def save(started: Any, folder: Path, step: int) -> None:
    from cdrmix.models.backbone import logical_name

    save_checkpoint(
        folder,
        step,
        engine_state.fragments(started.engine, logical_name),
        state={"engine": engine_state.counters(started.engine)},
        rank_state={},
        keep=1,
    )


def load(started: Any, folder: Path) -> None:
    from cdrmix.models.backbone import logical_name

    newest = find_newest(folder)
    assert newest is not None
    with CheckpointFile(newest.path) as checkpoint:
        engine_state.load_engine(started.engine, checkpoint, logical_name)


def go_on(started: Any) -> tuple[Any, Any]:
    losses, _ = run_steps(started, first=3, count=3)
    return losses, state_of(started.engine)


def resume(folder: str, case: Case) -> tuple[Any, Any]:
    started = start(case, seed=77)
    load(started, Path(folder))
    return go_on(started)


def resume_alone(folder: str) -> Any:
    runtime.initialize_distributed()
    wake_blocks()
    alone = replace(RESUMED, data=1)
    found = [resume(folder, replace(alone, profile=name))[0] for name in ("zero1", "zero2_offload")]
    runtime.destroy_distributed()
    return found


def test_resuming_is_bitwise_and_moves_to_other_layouts(tmp_path: Path) -> None:
    ranks = run_ranks(save_and_go_on, 2, str(tmp_path))
    for ended, again, untrained in ranks:
        assert ended == again
        assert {name.split()[1] for name in untrained} == {"param"}
    losses, state = ranks[0][0][0]
    kinds = {name.split()[1] for name in state}
    assert {"param", "momentum_buffer", "neuron_square", "exp_avg"} <= kinds
    for found in run_ranks(resume_alone, 1, str(tmp_path))[0]:
        assert found == pytest.approx(losses, rel=1e-6)


def begin_and_spike() -> tuple[list[float], int, int, str]:
    """Norms of a plain start, its spikes, those with one planted behind it, and the log of it."""
    import logging

    runtime.initialize_distributed()
    training = {"max_steps": 60, "warmup_steps": 10}
    started = start(Case(moe=False, optimizer="muon", model=SMALL, training=training))
    engine, optimizer = started.engine, started.engine.optimizer.optimizer
    told = io.StringIO()
    logging.getLogger("cdrmix").addHandler(logging.StreamHandler(told))
    run_steps(started, count=1)
    norms = optimizer.history()["norms"]
    run_steps(started, first=1, count=39)
    norms += optimizer.history()["norms"]
    plain = optimizer.spikes
    backward = engine.backward
    engine.backward = lambda loss: backward(100 * loss)
    run_steps(started, first=40, count=1)
    engine.backward = backward
    run_steps(started, first=41, count=4)
    runtime.destroy_distributed()
    return norms, plain, optimizer.spikes, told.getvalue()


def test_a_plain_start_has_no_spikes_and_a_planted_one_is_told() -> None:
    ((norms, plain, spikes, told),) = run_ranks(begin_and_spike, 1)
    # Blocks wake up behind projections of zeros.
    assert norms[-1] > 20 * norms[0]
    assert (plain, spikes) == (0, 1)
    assert told.count("warning: step 41: the norm of the matrices' gradients is") == 1

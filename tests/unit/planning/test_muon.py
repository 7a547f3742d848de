"""Which tensors are Muon's, and what its Newton-Schulz iterations cost."""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import processes
from cdrmix.planning.comparison import compare
from cdrmix.planning.counts import count, parameters
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.muon import (
    matrices_of,
    muon_matrices,
    newton_schulz_flops,
    newton_schulz_ratio,
    takes_muon,
)
from cdrmix.planning.parameter import Parameter
from cdrmix.planning.rules import advise
from tests.unit.planning.test_rules import layout


def config(*overrides: str, variant: str = "core-tiny") -> Config:
    path = shipped("model_configs") / f"cdrmix-{variant}.yaml"
    return load_config(path, ("optimizer.kind=muon", *overrides))


def taken(*overrides: str) -> set[str]:
    """Endings of the names of what Muon trains."""
    given = config(*overrides)
    found = [p for p in parameters(given.model) if takes_muon(p, given.optimizer)]
    return {p.name.split(".", 2)[2] for p in found}


MIXERS = {f"mixer.{name}.weight" for name in ("receptance", "key", "value", "output", "query")}
EXPERTS = {"ffn.experts.up", "ffn.experts.down"}


def test_hidden_matrices_are_muons_and_nothing_else() -> None:
    assert taken() == MIXERS | EXPERTS
    assert taken("model.moe=null") == MIXERS | {"ffn.up.weight", "ffn.down.weight"}
    assert taken("optimizer.experts=adamw") == MIXERS
    low_rank = taken("optimizer.low_rank=muon") - MIXERS - EXPERTS
    paths = ("decay", "iclr", "value", "gate")
    assert low_rank == {f"mixer.{path}_{end}" for path in paths for end in ("down", "up")}
    assert taken("optimizer.kind=adamw") == set()


def test_kernels_and_vectors_of_other_models_are_adamws() -> None:
    muon = config().optimizer
    assert not takes_muon(Parameter("conv1d.weight", (64, 1, 4), "mamba"), muon)
    assert takes_muon(Parameter("in_proj.weight", (64, 16), "mamba"), muon)
    assert not takes_muon(Parameter("x", (4, 4), "feed_forward", is_trained=False), muon)
    # Its rows are three maps, of unequal sizes.
    assert not takes_muon(Parameter("mixer.x_proj.weight", (20, 64), "mamba"), muon)
    packed = Parameter("experts.gate_up_proj", (8, 2 * 30, 16), "experts")
    assert takes_muon(packed, muon)
    assert matrices_of(packed) == (16, 30, 16)


def test_flops_of_an_iteration() -> None:
    assert newton_schulz_flops(3, 7, 5) == newton_schulz_flops(7, 3, 5) == 5 * (4 * 9 * 7 + 2 * 27)


def test_the_ratio_falls_with_the_batch_and_is_warned_of() -> None:
    large = config(variant="core-1b")
    at = {size: newton_schulz_ratio(config(f"training.global_batch_size={size}", variant="core-1b"))
          for size in (4, 128)}  # fmt: skip
    assert at[4] == pytest.approx(32 * at[128])
    number, elements = muon_matrices(large)
    per_token = count(large.model, large.training.sequence_length).train_flops_per_token
    assert number > 24 * 8 * 2
    assert elements < count(large.model, 4096).total_params
    # Of the 1B variant's steps of half a million tokens it is about a twenty-fifth.
    assert at[128] == pytest.approx(206e12 / (per_token * 128 * 4096), rel=0.01)
    assert advise(layout("optimizer.kind=muon", "training.global_batch_size=64")) == []
    (warning,) = advise(layout("optimizer.kind=muon"))
    assert "Newton-Schulz takes 0.41 of the FLOPs of training at 2,048 tokens" in warning
    assert "batches of 8,4" in warning
    assert "optimizer.experts = adamw, which leaves 0.05" in warning


def test_a_plan_tells_flops_ratio_and_the_smaller_states() -> None:
    plans = [compare(given, processes(2)).to_json() for given in
             (config(), config("optimizer.kind=adamw"))]  # fmt: skip
    muon, adamw = plans
    assert muon["newton_schulz_ratio"] == pytest.approx(newton_schulz_ratio(config()))
    assert adamw["newton_schulz_flops_per_step"] == adamw["newton_schulz_ratio"] == 0
    states = [plan["memory_per_rank_bytes"]["optimizer"] for plan in plans]
    _, elements = muon_matrices(config())
    assert states[1] - states[0] == pytest.approx(4 * elements / 2, rel=0.01)
    assert muon["step_seconds"] > adamw["step_seconds"]


def test_a_plan_has_room_for_a_round_beyond_the_activations() -> None:
    matrices = 4 * 256 * 256 + 2 * 256 * 1024  # of one block without experts
    given = config(
        *("model.moe=null", "model.num_layers=1", "model.mixers=[transformer]"),
        *("model.hidden_size=256", "model.num_heads=2", "model.ffn_hidden_size=1024"),
        *("training.precision=bf16", "training.sequence_length=8"),
    )
    assert muon_matrices(given) == (6, matrices)
    alone, spread = (
        MemoryModel(given, "cpu").estimate(Layout(Degrees(data), 2, 1, 1, False))
        for data in (1, 64)
    )
    assert alone.buffers["newton_schulz"] == 28 * matrices - alone.activations > 0
    # A rank owns a matrix at least, however small its share.
    assert spread.buffers["newton_schulz"] == 28 * 256 * 1024 - spread.activations > 0
    adamw = given.model_copy(update={"optimizer": OptimizerConfig()})
    buffers = MemoryModel(adamw, "cpu").estimate(Layout(Degrees(), 2, 1, 1, False)).buffers
    assert "newton_schulz" not in buffers

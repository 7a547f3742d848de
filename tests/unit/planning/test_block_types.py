"""Every registered block type: its two halves agree, and its planning half needs no torch."""

import subprocess
import sys

import pytest
import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import BLOCK_TYPES, ModelConfig
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.models.backbone import Backbone
from cdrmix.models.block import Block
from cdrmix.models.mixer import Mixer
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.block_type import block_type
from cdrmix.planning.cluster import processes
from cdrmix.planning.counts import block_parameters, count, parameters
from cdrmix.planning.profile import choose

CONFIGS = shipped("model_configs")
FAMILY = load_config(CONFIGS / "cdrmix-moe5b.yaml")


def all_of(kind: str) -> ModelConfig:
    tiny = load_config(CONFIGS / "cdrmix-core-tiny.yaml", [f"model.mixers=[{kind}*4]"])
    return tiny.model


def family(*overrides: str) -> Config:
    return load_config(CONFIGS / "cdrmix-moe5b.yaml", overrides)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_both_halves_of_a_type_agree(kind: str) -> None:
    model, planned = all_of(kind), block_type(kind)
    with torch.device("meta"):
        block = Block(model, 1)
    assert isinstance(block.mixer, Mixer)
    assert block.mixer.carries_state == planned.carries_state
    assert (block.mixer.state_type is not None) == planned.carries_state
    assert (block.ffn_shift is not None) == planned.shifts_channels
    built = {
        name: tuple(each.shape)
        for name, each in block.named_parameters()
        if name.startswith("mixer.")
    }
    listed = {each.name: each.shape for each in planned.parameters(model, 1)}
    assert list(built.items()) == list(listed.items()), "shapes, and the order of the module"
    assert planned.is_exchanged(model) == bool(block.mixer.across_tokens)
    for name in planned.adapted:
        assert isinstance(block.mixer.get_submodule(name), torch.nn.Linear)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_type_that_can_be_cut_says_where(kind: str) -> None:
    planned = block_type(kind)
    if "tensor" in planned.refused_axes:
        assert planned.refused_axes["tensor"]
        return
    cuts = [each for each in block_parameters(all_of(kind), 1) if each.name.startswith("mixer.")]
    assert all((each.cut is None) == each.is_partial for each in cuts)
    # the one map out of the region, whose products are summed
    assert "mixer.output.weight" in [each.name for each in cuts if each.cut == 1]


def test_planning_reads_every_type_without_torch() -> None:
    code = (
        "import sys; from cdrmix.config.model import BLOCK_TYPES; "
        "from cdrmix.planning.blocks.block_type import block_type; "
        "[block_type(kind) for kind in BLOCK_TYPES]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_family_is_of_the_size_it_states() -> None:
    counts = count(FAMILY.model, FAMILY.training.sequence_length)
    assert counts.total_params == pytest.approx(6.07e9, rel=0.005)
    assert counts.active_params == pytest.approx(1.67e9, rel=0.005)
    layers = FAMILY.model.layer_kinds()
    assert [n for n, kind in enumerate(layers) if "mamba" in kind] == list(range(5, 32, 4))
    assert [n for n, kind in enumerate(layers) if kind == "routing_mamba"] == [9, 17, 25]
    assert FAMILY.model.moe_layers() == tuple(n for n in range(32) if n % 4 in (2, 3))
    # the figure is sharp enough to notice an expert more in each layer
    more = family("model.moe.num_experts=17").model
    assert count(more, 2048).total_params != pytest.approx(6.07e9, rel=0.005)


def test_the_tiny_form_has_the_same_layers() -> None:
    tiny = load_config(CONFIGS / "cdrmix-moe5b-tiny.yaml").model
    assert tiny.layer_kinds() == FAMILY.model.layer_kinds()
    assert tiny.moe_layers() == FAMILY.model.moe_layers()
    assert tiny.ffn_activation == FAMILY.model.ffn_activation


@pytest.fixture
def running_mean(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A model with layers of a type that tests/running_mean.py adds by one registration."""
    monkeypatch.setitem(BLOCK_TYPES, "running_mean", "tests.running_mean:RunningMeanBlock")
    return load_config(
        CONFIGS / "cdrmix-core-tiny.yaml",
        ["model.mixers=[running_mean, transformer, running_mean*2]", "model.moe=null"],
    )


def test_an_added_type_is_counted_planned_and_refused(running_mean: Config) -> None:
    with torch.device("meta"):
        built = Backbone(running_mean.model)
    shapes = {name: tuple(each.shape) for name, each in built.named_parameters()}
    assert {each.name: each.shape for each in parameters(running_mean.model)} == shapes
    plan = choose(running_mean, processes(2))
    assert plan.memory is not None and plan.memory.activations > 0
    given = {"data": 2, "sequence": 2}
    with pytest.raises(PlanError, match=r"running_mean \(it has no exchange"):
        choose(
            running_mean.model_copy(
                update={"parallel": running_mean.parallel.model_copy(update=given)}
            ),
            processes(2),
        )


def test_an_added_type_is_run_in_spans_and_decoded(running_mean: Config) -> None:
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    gradients = []
    for spans in (None, 5):
        made = Backbone(
            running_mean.model, activation_checkpointing="spans", sequence_checkpoint_tokens=spans
        )
        made.initialize(seed=1)
        made.logits(made(ids).hidden).square().mean().backward()
        gradients.append([each.grad for each in made.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    made.eval()
    with torch.no_grad():
        whole = made(ids).hidden
        first = made(ids[:, :7], return_state=True)
        rest = made(ids[:, 7:], state=first.state)
    torch.testing.assert_close(torch.cat([first.hidden, rest.hidden], 1), whole)


def test_an_added_type_saves_what_it_says(running_mean: Config) -> None:
    """With a size that is off by one tensor in twenty the measured bytes would not be met."""
    setting = SavedActivations(running_mean, "cpu").setting
    planned = block_type("running_mean").saved(setting, 0, "whole")
    with torch.device("cpu"):
        mixer = block_type("running_mean").module_class().of_layer(running_mean.model, 0)
    x = torch.randn(1, 64, running_mean.model.hidden_size, requires_grad=True)
    saved: dict[int, int] = {}

    def note(each: torch.Tensor) -> torch.Tensor:
        if each.shape[-1] != each.shape[0] and not isinstance(each, torch.nn.Parameter):
            saved[each.data_ptr()] = each.numel() * each.element_size()
        return each

    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        mixer(x)
    assert sum(saved.values()) / 64 == pytest.approx(planned.whole + planned.split, rel=0.05)

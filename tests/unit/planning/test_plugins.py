"""Blocks, schedules, optimizers and terms of a user's, as planning sees and refuses them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.models.backbone import Backbone
from cdrmix.models.mixer_trial import try_mixers
from cdrmix.optimizers.schedule import learning_rate
from cdrmix.optimizers.users import users_optimizer
from cdrmix.planning.cluster import processes
from cdrmix.planning.counts import parameters
from cdrmix.planning.plugin_checks import check_plugins
from cdrmix.planning.plugins import optimizer_of
from cdrmix.planning.profile import check_legal, choose
from cdrmix.planning.shrink import rehearsals
from tests import plugins

TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"
BLOCKS = "model.mixers=['tests.plugins:Window*3', transformer]"


def config(*overrides: str) -> Config:
    return load_config(TINY, overrides)


def test_a_block_is_counted_planned_and_built_with_its_options() -> None:
    options = "model.mixer_options={'tests.plugins:Window': {tokens: 3}}"
    given = config(BLOCKS, options, "model.moe=null")
    with torch.device("meta"):
        built = Backbone(given.model)
    shapes = {name: tuple(each.shape) for name, each in built.named_parameters()}
    assert {each.name: each.shape for each in parameters(given.model)} == shapes
    mixers = [block.mixer for block in built.blocks]
    assert [each.tokens for each in mixers if isinstance(each, plugins.WindowMixer)] == [3] * 3
    # options are of one model, and not kept for the next
    with torch.device("meta"):
        assert Backbone(config(BLOCKS).model).blocks[0].mixer.tokens == 2
    assert choose(given, processes(2)).memory is not None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.mixers=['tests.plugin:Window*4']"], "tests.plugin cannot be imported"),
        (["model.mixers=['tests.plugins:Windows*4']"], "Did you mean Window"),
        (["model.mixers=['tests.plugins:Waves*4']"], "is no class made of"),
        (
            [BLOCKS, "model.mixer_options={'tests.plugins:Window': {token: 3}}"],
            "model.mixer_options.tests.plugins:Window.token: Extra inputs",
        ),
        (
            ["model.mixers=['tests.refused_plugins:Uncounted*4']"],
            "tests.refused_plugins:Uncounted lacks mixing_flops, saved",
        ),
        (["model.mixers=['tests.refused_plugins:Homeless*4']"], "`module` names no class"),
        (["model.mixers=['tests.refused_plugins:Elsewhere*4']"], "as `mixer.NAME`"),
        (["model.mixers=['tests.refused_plugins:Raises*4']"], "Raises: ZeroDivisionError"),
        (["training.schedule=tests.plugins:Waves"], "period_steps: Field required"),
        (
            ["training.schedule=tests.refused_plugins:Sinks", "training.max_steps=1000000"],
            "Sinks gives -1.0 as the learning rate of step 999999",
        ),
        (["training.schedule=tests.refused_plugins:Forgets"], "gives None as the learning rate"),
        (["optimizer.kind=tests.refused_plugins:Undeclared"], "must declare `states`"),
        (["objectives.plugins=[{use: tests.plugins:HeavyBall}]"], "objectives.plugins[0].use"),
        (
            ["objectives.plugins=[{use: tests.plugins:Confidence, options: {power: two}}]"],
            "objectives.plugins[0].options.power",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_legal(config(*overrides), world_size=1)
    assert told in str(caught.value)


def test_all_refusals_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_plugins(
            config("training.schedule=a.b:C", "optimizer.kind=tests.refused_plugins:Undeclared")
        )
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("name", ["Other", "Renamed"])
def test_a_module_unlike_its_block_type_is_not_built(name: str) -> None:
    given = config(f"model.mixers=['tests.refused_plugins:{name}*4']")
    check_plugins(given)  # planning cannot know
    with pytest.raises(ConfigError, match=rf"tests.refused_plugins:{name}"), torch.device("meta"):
        Backbone(given.model)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tests.refused_plugins:Stateless", "would write nonsense"),
        ("tests.refused_plugins:Foreseeing", "sees later tokens"),
        ("tests.plugins:Window", "mixes documents"),
    ],
)
def test_a_module_that_cannot_be_trained_or_decoded_is_refused(name: str, told: str) -> None:
    model = config(f"model.mixers=['{name}*4']").model
    with pytest.raises(ConfigError) as caught:
        try_mixers(model, segments_documents=True)
    assert told in str(caught.value) and name in str(caught.value)
    if name == "tests.plugins:Window":  # as it is, with one document a sample
        try_mixers(model, segments_documents=False)


def test_a_schedule_tells_every_rate() -> None:
    training = config(
        "training.schedule=tests.plugins:Waves",
        "training.schedule_options={period_steps: 4}",
        "training.learning_rate=1.0",
        "training.min_learning_rate=0.5",
    ).training
    assert [learning_rate(step, training) for step in range(5)] == [1.0, 0.75, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Mixes", "declares `elementwise`, and steps a vector otherwise when it is cut in two"),
        ("Remembers", "keeps some outside of `state`"),
        ("Misnames", "declares states = {'momentum': 4}"),
        ("Widens", "keeps 'history' in its state, neither"),
        ("Rests", "changes no weight in a trial"),
        ("Regroups", "has other parameter groups"),
        ("Fails", "fails in a trial: KeyError"),
    ],
)
def test_an_optimizer_other_than_it_declares_is_refused(name: str, told: str) -> None:
    given = config(f"optimizer.kind=tests.refused_plugins:{name}")
    check_plugins(given)
    made = optimizer_of(given.optimizer)
    assert made is not None
    with pytest.raises(ConfigError) as caught:
        users_optimizer(torch.nn.Linear(2, 2), given, made)
    assert told in str(caught.value)


def test_one_that_is_as_it_declares_is_made() -> None:
    for name in ("HeavyBall", "Whole"):
        given = config(f"optimizer.kind=tests.plugins:{name}", "optimizer.options={momentum: 0.5}")
        made = users_optimizer(torch.nn.Linear(2, 2), given, optimizer_of(given.optimizer))
        assert isinstance(made, plugins._HeavyBall)
        assert [group["name"] for group in made.param_groups] == ["matrices", "vectors"]


def test_memory_is_that_of_the_declared_state_and_the_terms() -> None:
    usual = choose(config(), processes(1)).memory
    planned = choose(config("optimizer.kind=tests.plugins:HeavyBall"), processes(1)).memory
    assert usual is not None and planned is not None
    # master and velocity in place of master, mean and square
    assert planned.optimizer / usual.optimizer == pytest.approx(8 / 12, rel=1e-4)
    layout = choose(config("training.micro_batch_size=4"), processes(1))
    term = "objectives.plugins=[{use: tests.plugins:Confidence}]"
    with_term = choose(config("training.micro_batch_size=4", term), processes(1))
    assert layout.memory is not None and with_term.memory is not None
    more = with_term.memory.activations - layout.memory.activations
    assert more == 4 * 256 * 3 * 4 * config().model.vocab_size


def test_a_rehearsal_keeps_blocks_optimizer_and_terms() -> None:
    given = config(
        BLOCKS,
        "model.mixer_options={'tests.plugins:Window': {tokens: 3}}",
        "training.schedule=tests.plugins:Waves",
        "training.schedule_options={period_steps: 4}",
        "optimizer.kind=tests.plugins:HeavyBall",
        "objectives.plugins=[{use: tests.plugins:Length}]",
    )
    plan = choose(given, processes(2))
    for each in rehearsals(given, plan):
        assert set(given.model.mixers or ()) == set(each.config.model.mixers or ())
        assert each.config.model.mixer_options == given.model.mixer_options
        assert each.config.optimizer == given.optimizer
        assert each.config.objectives.plugins == given.objectives.plugins  # type: ignore[union-attr]


def test_a_block_of_planning_alone_imports_no_torch(tmp_path: Path) -> None:
    text = """
        from cdrmix.planning.blocks.block_type import BlockType, PerToken
        from cdrmix.planning.parameter import Parameter

        class Plain(BlockType):
            module = "elsewhere:Module"

            def parameters(self, model, layer):
                yield Parameter("mixer.weight", (model.hidden_size,) * 2, "mixer")

            def mixing_flops(self, model, sequence_length):
                return 0

            def saved(self, setting, layer, form):
                return PerToken(setting.model.hidden_size)
        """
    (tmp_path / "light_blocks.py").write_text(textwrap.dedent(text))
    code = (
        "import sys; from cdrmix.config.load import load_config; "
        "from cdrmix.planning.profile import check_legal; "
        f"given = load_config({str(TINY)!r}, ['model.mixers=[\\'light_blocks:Plain*4\\']']); "
        "check_legal(given, world_size=2); sys.exit('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}", "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)

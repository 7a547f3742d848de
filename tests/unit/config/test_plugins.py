"""Classes of a user's that a configuration names."""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.plugin import plugins_of
from cdrmix.errors import ConfigError

TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"


def test_plugins_of_every_section_are_found_once() -> None:
    config = load_config(
        TINY,
        [
            "model.mixers=[rwkv, 'a.blocks:Mean*2', transformer]",
            "model.mixer_options={'a.blocks:Mean': {heads: 2}}",
            "training.schedule=rates:Waves",
            "optimizer.kind=optimizers:Lion",
            "objectives.plugins=[{use: losses:Far}, {use: losses:Far, name: again}]",
            "hooks=[{use: my_hooks:Noise, options: {use: none:Of}}]",
            # texts of other fields are no names of classes
            "launch.environment={PAIR: one:two}",
            "name=one:two",
        ],
    )
    expected = ["a.blocks:Mean", "rates:Waves", "losses:Far", "optimizers:Lion", "my_hooks:Noise"]
    assert plugins_of(config) == expected
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert plugins_of(load_config(TINY)) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.schedule=cosin", "did you mean 'cosine'?"),
        ("training.schedule=my.rates", "or package.module:Name"),
        ("optimizer.kind=my optimizers:Lion", "allowed is one of adamw, muon"),
        ("training.schedule_options={a: 1}", "schedule = cosine has none"),
        ("optimizer.options={a: 1}", "kind = adamw has none"),
        ("model.mixer_options={'a:B': {}}", "which is no block type of yours in mixers"),
        ("model.mixers=['a:*4']", "'a:*4': give a block type"),
        ("objectives.plugins=[{use: a:B}, {use: c:B}]", "several parts of the loss are called B"),
        ("objectives.plugins=[{use: a:thought}]", "several parts of the loss are called thought"),
        ("objectives.plugins=[{use: a:B, name: mtp_2}]", "are called mtp_2"),
    ],
)
def test_what_does_not_fit_is_told(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, [override])
    assert told in str(caught.value)

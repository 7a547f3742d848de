"""docs/configuration.md and `cdrmix config --explain` say what the schema and the code say."""

from pathlib import Path

import pytest

from cdrmix import cli
from cdrmix.config.evaluation import SuiteConfig
from cdrmix.config.load import load_config, shipped
from cdrmix.config.objectives import TermConfig
from cdrmix.config.plugin import HookConfig
from cdrmix.config.problems import field_paths
from cdrmix.config.reference import KeyEntry, explain, groups, reference_markdown
from cdrmix.config.resuming_rules import _RULES, when_resumed
from cdrmix.config.schema import Config, MixturePhase
from cdrmix.config.section import Section
from cdrmix.config.tracking import TrackerConfig
from cdrmix.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
REASON = shipped("model_configs") / "cdrmix-reason-tiny.yaml"
ENTRIES = {entry.path: entry for group in groups() for entry in group.entries}
# A Hugging Face model whose folder has gone, as a checkpoint tells it.
_HUGGING_FACE = ["model.kind=hf", "model.path=/models/gone", "stage_b=null"]
_HUGGING_FACE += ["model.num_kv_heads=4", "model.head_dim=32", "model.ffn_hidden_size=512"]
_BASE = ["training.start_from=experiments/first"]
_REPLAY = [*_BASE, "cpt.replay.source=/data/old"]
# Keys that are allowed with another one only.
# A reasoning variant without its Stage B, which such layers are refused in.
_MAMBA = ["model.mixers=[mamba*2, routing_mamba*2]", "stage_b=null"]
NEEDS = {
    **{path: _REPLAY for path in ENTRIES if path.startswith("cpt.")},
    **dict.fromkeys(("cpt", "cpt.replay", "cpt.replay.source"), _BASE),
    **{path: _HUGGING_FACE for path in ENTRIES if path.startswith(("model.lora", "model.path"))},
    **{path: _MAMBA for path in ENTRIES if path.startswith(("model.mamba", "model.routing_mamba"))},
    "training.sequence_checkpoint_tokens": ["training.activation_checkpointing=spans"],
    "training.hold_learning_rate": ["training.schedule=infinite", "training.settle_steps=100"],
    "training.settle_steps": ["training.schedule=infinite", "training.hold_learning_rate=2e-3"],
    **{
        path: [f"{tier}.path=/tier"]
        for tier in ("checkpoint.tiers.local", "checkpoint.tiers.archive")
        for path in ENTRIES
        if path.startswith(f"{tier}.")
    },
    "training.schedule_options": ["training.schedule=my_rates:Waves"],
    "optimizer.options": ["optimizer.kind=my_optimizers:Lion"],
    "model.mixer_options": ["model.mixers=[my_blocks:RunningMean*4]", "stage_b=null"],
    **{path: ["profile={steps: [1, 2]}"] for path in ENTRIES if path.startswith("profile.")},
    "checkpoint.auto_range": ["checkpoint.every_steps=null", "checkpoint.every_minutes=auto"],
    "stage_b.run": ["training.stage=b"],
    "checkpoint.retention.options": ["checkpoint.retention.use=my_rules:Weekly"],
    **{path: ["training.stage=a"] for path in ENTRIES if path.startswith("model.mtp")},
    "stage_b.pipeline": ["stage_b.training.backbone_lr_scale=0"],
}
# Key that an entry of a list must have.
_REQUIRED = {
    "evaluation.suites": "name: routing",
    "hooks": "use: my_hooks:Noise",
    "objectives.plugins": "use: my_losses:Confidence",
    "monitoring.trackers": "use: wandb",
}


def test_the_page_is_generated_from_the_schema_as_it_is() -> None:
    told = "run: cdrmix config --reference > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == reference_markdown(), told


def test_every_key_has_an_entry_and_a_meaning() -> None:
    titles = {group.path for group in groups()}
    # Entries of lists have no path of their own in the schema.
    lists: dict[str, type[Section]] = {
        "data.mixture.phases[]": MixturePhase,
        "evaluation.suites[]": SuiteConfig,
        "hooks[]": HookConfig,
        "objectives.plugins[]": TermConfig,
        "monitoring.trackers[]": TrackerConfig,
    }
    inner = {f"{path}.{key}" for path, section in lists.items() for key in section.model_fields}
    paths = {".".join(path) for path in field_paths(Config)}
    assert paths | inner == {*ENTRIES} | titles - {"", *lists}
    assert all(entry.meaning for entry in ENTRIES.values())
    assert all(group.meaning for group in groups())


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.path)
def test_an_example_is_a_value_that_loads(entry: KeyEntry) -> None:
    override = f"{entry.path}={entry.example}"
    if "[]" in entry.path:
        path, _, key = entry.path.partition("[].")
        needed = _REQUIRED.get(path)
        required = f"{needed}, " if needed and not needed.startswith(f"{key}:") else ""
        override = f"{path}=[{{{required}{key}: {entry.example}}}]"
    assert load_config(REASON, [*NEEDS.get(entry.path, []), override])


def test_an_entry_tells_type_unit_default_range_and_example() -> None:
    rate = ENTRIES["training.learning_rate"]
    assert (rate.type, rate.unit, rate.default) == ("number", "per step", "required")
    assert (rate.allowed, rate.example) == ("above 0", "0.004")
    assert ENTRIES["training.precision"].allowed == "bf16, fp16, fp32"
    assert ENTRIES["training.micro_batch_size"].allowed == "from 1 or auto, or null"
    # of the whole section, of the first word
    assert ENTRIES["stage_b.losses.ce"].unit == "ratio"
    assert ENTRIES["checkpoint.every_minutes"].unit == "minutes"
    assert ENTRIES["training.precision"].unit == ""
    assert ENTRIES["model.head_dim"].default == "derived"
    assert ENTRIES["checkpoint.keep"].default == "3"


def test_an_entry_tells_whether_a_resumed_run_may_have_another_value() -> None:
    paths = {path.replace("[]", "") for path in ENTRIES} | {group.path for group in groups()}
    assert {*_RULES} <= paths
    assert when_resumed("model.moe.top_k") == "refused"
    assert when_resumed("training.learning_rate").startswith("may change, with a warning")
    assert when_resumed("monitoring.log_every_steps") == "may change"
    assert when_resumed("data.mixture.phases.tokens").startswith("refused in Stage A")


def test_the_verb_explains_a_key_and_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--explain", "training.learning_rate"]) == 0
    told = capsys.readouterr().out
    assert "Peak learning rate (per step)." in told
    assert "--set training.learning_rate=0.004" in told
    assert cli.main(["config", "--explain", "model.moe"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("model.moe\n")
    assert "model.moe.top_k\n" in told
    assert "data.mixture.phases[].tokens" in explain("data.mixture.phases.0.tokens")
    assert "learning_rate" not in explain("checkpoint")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lr", "training.learning_rate?"),
        ("batch_size", "training.global_batch_size?"),
        ("block_size", "training.sequence_length?"),
        ("training.learning_rat", "training.learning_rate"),
        ("seed", "training.seed?"),
        ("trainig.seed", "training.seed?"),
        ("helth", "health"),
        ("", "Try name, model"),
        ("xyzzy", "Try name, model"),
    ],
)
def test_an_unknown_key_is_led_to_the_right_one(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="no such key") as caught:
        explain(key)
    assert meant in str(caught.value)

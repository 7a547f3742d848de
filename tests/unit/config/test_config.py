"""Files and overrides become a Config, or one report of everything that is wrong with them."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from cdrmix.config.load import (
    ABSENT,
    changed_keys,
    config_hash,
    load_config,
    shipped,
)
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.config.yaml_text import dump_yaml, parse_yaml
from cdrmix.errors import ConfigError

SHIPPED = sorted(shipped("model_configs").glob("*.yaml"))
TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"
REASON = shipped("model_configs") / "cdrmix-reason-1b.yaml"


def problems(path: Path, *overrides: str) -> list[str]:
    """Lines of the report of a config that cannot be loaded."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def written(folder: Path, text: str) -> Path:
    path = folder / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def changed_tiny(folder: Path, old: str, new: str) -> Path:
    """The tiny config with one piece of its text replaced."""
    text = TINY.read_text(encoding="utf-8")
    assert old in text
    return written(folder, text.replace(old, new))


# --- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_is_named_after_its_file(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert (config.stage_b is not None) == ("reason" in path.stem)


@pytest.mark.parametrize(
    ("scale", "values"),
    [
        ("1b", (2048, 24, 16, 4608, 1.0, 1.0, 128, 3e-4, 300e9)),
        ("4b", (3072, 36, 24, 8192, 1.0, 1.0, 256, 2.5e-4, 300e9)),
        ("40b", (6144, 64, 48, 16384, 0.9, 0.9, 1024, 1.5e-4, 2e12)),
        ("200b", (12288, 96, 96, 32768, 0.8, 0.8, 2048, 1e-4, 2e12)),
    ],
)
@pytest.mark.parametrize("family", ["core", "reason"])
def test_the_variants_have_the_values_of_the_scale_table(
    family: str, scale: str, values: tuple
) -> None:
    config = load_config(shipped("model_configs") / f"cdrmix-{family}-{scale}.yaml")
    model, training = config.model, config.training
    assert model.moe is not None
    found = (
        model.hidden_size,
        model.num_layers,
        model.num_heads,
        model.moe.expert_hidden_size,
        training.gradient_clipping,
        model.init_std_scale,
        training.global_batch_size,
        training.learning_rate,
        training.total_tokens,
    )
    assert found == values
    assert (model.head_dim, model.vocab_size) == (128, 50272)
    assert (model.moe.num_experts, model.moe.top_k) == (8, 2)
    assert (model.moe.capacity_factor, model.moe.drop_tokens) == (1.25, True)
    assert model.layer_kinds().count("transformer") == model.num_layers // 4
    assert training.min_learning_rate == pytest.approx(training.learning_rate / 10)
    assert (training.sequence_length, training.precision) == (4096, "bf16")
    assert training.activation_checkpointing == ("spans" if scale in ("40b", "200b") else "none")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("training: {activation_checkpointing: false}", "none"),
        ("training: {activation_checkpointing: true}", "block"),
        ("training: {activation_checkpointing: true, sequence_checkpoint_tokens: null}", "block"),
        ("training: {activation_checkpointing: true, sequence_checkpoint_tokens: 64}", "spans"),
        ("training: {activation_checkpointing: spans}", "spans"),
        ("training: {activation_checkpointing: selective}", "selective"),
    ],
)
def test_recomputation_has_a_word_and_older_files_are_understood(given: str, word: str) -> None:
    values = load_config(TINY).model_dump()
    values["training"] |= parse_yaml(given, place="test")["training"]
    assert Config.model_validate(values).training.activation_checkpointing == word


@pytest.mark.parametrize("given", ["none", "selective", "block", "true"])
def test_the_length_of_spans_needs_spans(given: str) -> None:
    settings = [f"training.activation_checkpointing={given}"]
    settings.append("training.sequence_checkpoint_tokens=64")
    if given == "true":  # the older way of saying so
        assert load_config(TINY, settings).training.activation_checkpointing == "spans"
        return
    told = f"needs activation_checkpointing = spans, and this is {given}"
    with pytest.raises(ConfigError, match=told):
        load_config(TINY, settings)


def test_the_tiny_config_is_dropless_and_single_precision() -> None:
    config = load_config(TINY)
    assert config.model.moe is not None
    assert not config.model.moe.drop_tokens
    assert config.training.precision == "fp32"
    assert config.model.layer_kinds() == ("rwkv", "rwkv", "rwkv", "transformer")


def test_both_kinds_of_yaml_reader_see_the_same_values_in_shipped_files() -> None:
    for path in SHIPPED:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert Config.model_validate(_whole(plain)) == load_config(path)


def _whole(values: object) -> object:
    if isinstance(values, dict):
        return {key: _whole(value) for key, value in values.items()}
    is_whole = isinstance(values, float) and values.is_integer() and values > 1e6
    return int(values) if is_whole else values


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_resolved_config_loads_to_an_equal_one(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    again = load_config(written(tmp_path, dump_yaml(config.model_dump())))
    assert again == config
    assert dump_yaml(again.model_dump()) == dump_yaml(config.model_dump())
    assert config_hash(again) == config_hash(config)


@pytest.mark.parametrize("text", ["no", "1e3", "010", "null", "a: b", "# x", " ", "1:30", "é\t"])
def test_text_that_looks_like_something_else_survives_the_resolved_config(
    text: str, tmp_path: Path
) -> None:
    config = load_config(TINY).model_copy(update={"name": text})
    dumped = dump_yaml(config.model_dump())
    assert load_config(written(tmp_path, dumped)).name == text
    assert yaml.safe_load(dumped)["name"] == text


def test_the_hash_is_12_hex_digits_and_follows_the_values() -> None:
    config = load_config(TINY)
    assert re.fullmatch("[0-9a-f]{12}", config_hash(config))
    assert config_hash(config) == config_hash(load_config(TINY, ["training.seed=1234"]))
    assert config_hash(config) != config_hash(load_config(TINY, ["training.seed=1235"]))


def test_derived_dimensions_follow_their_sources() -> None:
    config = load_config(TINY, ["model.num_heads=2", "model.moe=null"])
    assert (config.model.head_dim, config.model.num_kv_heads) == (64, 2)
    assert config.model.ffn_hidden_size == 4 * config.model.hidden_size
    assert load_config(TINY).model.ffn_hidden_size == 2 * 256  # top_k * expert_hidden_size


# --- scalars and overrides ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.epsilon=3e-4", 3e-4),
        ("training.learning_rate=1", 1.0),
        ("training.total_tokens=300e9", 300_000_000_000),
        ("training.total_tokens=2_000_000", 2_000_000),
        ("training.warmup_steps=010", 10),
        ("training.deterministic=false", False),
        ("training.micro_batch_size=null", None),
        ("training.micro_batch_size=", None),
        ("training.micro_batch_size=4", 4),
        ("data.path=12", "12"),
        ("data.path= ~/a b: c # d", " ~/a b: c # d"),
        ("data.path='quoted'", "quoted"),
        ("evaluation.sample_prompt=def ", "def "),
        ("evaluation.sample_prompt=", ""),
        ("name=no", "no"),
    ],
)
def test_an_override_is_read_as_its_field_means_it(override: str, value: object) -> None:
    found: object = load_config(TINY, [override])
    for key in override.partition("=")[0].split("."):
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_the_last_of_two_overrides_wins() -> None:
    assert load_config(TINY, ["training.seed=1", "training.seed=2"]).training.seed == 2


def test_overrides_make_sections_that_the_file_lacks() -> None:
    config = load_config(TINY, ["parallel.expert=2", "monitoring.log_every_steps=1"])
    assert (config.parallel.expert, config.monitoring.log_every_steps) == (2, 1)
    back = load_config(
        TINY, ["model.moe=null", "model.moe.num_experts=4", "model.moe.expert_hidden_size=64"]
    )
    assert back.model.moe is not None
    assert back.model.moe.num_experts == 4


def test_overrides_reach_stage_b_and_can_remove_it() -> None:
    given = load_config(REASON, ["training.stage=b", "stage_b.run=experiments/x"])
    assert given.stage_b.run == "experiments/x"
    assert load_config(REASON, ["stage_b=null"]).stage_b is None


def test_a_run_of_both_stages_has_no_use_for_the_stage_a_of_another() -> None:
    (line,) = problems(REASON, "stage_b.run=experiments/x")
    assert "stage_b.run = experiments/x names that of another run" in line
    assert "say training.stage = b, or leave stage_b.run out" in line
    unknown, conflict = problems(REASON, "stage_b.run=experiments/x", "nam=other")
    assert "Did you mean 'name'?" in unknown
    assert "stage_b.run = experiments/x names that of another run" in conflict


def test_stage_b_on_the_backbone_of_another_run_has_no_degrees_of_stage_a() -> None:
    given = ("training.stage=b", "stage_b.run=experiments/x")
    for axis in ("tensor", "pipeline", "sequence", "expert"):
        (line,) = problems(REASON, *given, f"parallel.{axis}=2")
        assert f"parallel.{axis} = 2 lays out Stage A" in line
    # A run that goes on behind its own Stage A has that one's.
    assert load_config(REASON, ["training.stage=b", "parallel.expert=2"]).parallel.expert == 2


def test_stage_b_alone_judges_no_spikes_to_lower_a_rate_at() -> None:
    lowers = "health.loss_spike.action=lower_rate"
    load_config(REASON, [lowers])
    (line,) = problems(REASON, lowers, "training.stage=b", "stage_b.run=experiments/x")
    assert "lower_rate acts in Stage A" in line


def test_summary_slots_share_their_features_evenly() -> None:
    (line,) = problems(REASON, "stage_b.memory.summary_dim=100")
    assert "stage_b.memory.summary_dim: given 100" in line
    assert "a multiple of 8" in line


def test_a_section_made_by_an_override_must_be_complete() -> None:
    lines = problems(TINY, "stage_b.run=x")
    for line, key in zip(lines, ("adapters", "policy", "memory"), strict=True):
        assert line.startswith(f"--set stage_b.run: stage_b.{key}: missing. Give a section with")


# --- what is refused ------------------------------------------------------------------------


def test_an_unknown_key_is_told_with_the_nearest_and_all_known_ones(tmp_path: Path) -> None:
    path = changed_tiny(tmp_path, "top_k: 2", "topk: 2")
    assert problems(path) == [
        f"{path}: model.moe.topk: unknown key. Did you mean 'top_k'? Known: capacity_factor, "
        "drop_tokens, expert_hidden_size, layers, load_balance_weight, num_experts, top_k, "
        "z_loss_weight"
    ]


def test_a_key_of_another_section_is_told_where_it_belongs() -> None:
    (line,) = problems(TINY, "model.learning_rate=1")
    assert "It belongs at 'training.learning_rate'" in line


def test_a_report_about_a_pair_names_only_the_overrides_that_are_in_it() -> None:
    (line,) = problems(TINY, "training.seed=1", "training.min_learning_rate=1")
    assert line.startswith(f"{TINY} with --set training.min_learning_rate: training: ")


def test_a_misspelt_required_key_is_one_problem_not_two(tmp_path: Path) -> None:
    (line,) = problems(changed_tiny(tmp_path, "hidden_size: 128", "hiden_size: 128"))
    assert "Did you mean 'hidden_size'?" in line


def test_all_problems_of_file_and_overrides_are_in_one_report(tmp_path: Path) -> None:
    path = changed_tiny(tmp_path, "precision: fp32", "precision: fp23\n  sead: 1")
    assert sorted(problems(path, "training.beta1=1", "model.num_layers=two")) == [
        "--set model.num_layers: given 'two', allowed is a whole number from 1 and up to 9999. "
        "Blocks, RWKV and Transformer together (count).",
        "--set training.beta1: given 1, allowed is a number from 0 and below 1. AdamW decay of "
        "the mean (ratio).",
        f"{path}: training.precision: given 'fp23', allowed is one of bf16, fp16, fp32 (did you "
        "mean 'fp32'?). Type of weights and activations in forward and backward.",
        f"{path}: training.sead: unknown key. Did you mean 'seed'? Known: "
        + ", ".join(sorted(TrainingConfig.model_fields)),
    ]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.precision=bf61", "one of bf16, fp16, fp32 (did you mean 'bf16'?)"),
        ("training.deterministic=yes", "given 'yes', allowed is true or false"),
        ("training.deterministic=1", "given 1, allowed is true or false"),
        ("training.seed=true", "given true, allowed is a whole number from 0"),
        ("training.seed='7'", "given '7', allowed is a whole number from 0"),
        ("training.max_steps=2.5", "given 2.5, allowed is a whole number from 1, or null"),
        ("training.learning_rate=.inf", "given inf, allowed is a number above 0"),
        ("training.learning_rate=0", "given 0, allowed is a number above 0"),
        ("model.moe.expert_hidden_size=300", "= 300 is no multiple of 8"),
        ("model.head_dim=48", "given 48, allowed is one of 32, 64, 128"),
        ("model=3", "given 3, allowed is a section with the keys kind"),
        ("checkpoint=", "given null, allowed is a section with the keys every_steps"),
        ("training.warmup_steps.x=1", "training.warmup_steps = 40 is a value, not a section"),
        ("training.seed", "not an override. Give PATH=VALUE"),
        ("=3", "not an override. Give PATH=VALUE"),
        ("training..seed=3", "not an override. Give PATH=VALUE"),
    ],
)
def test_a_wrong_override_names_itself_and_what_is_allowed(override: str, told: str) -> None:
    (line,) = problems(TINY, override)
    assert line.startswith(f"--set {override.partition('=')[0]}")
    assert told in line


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.num_heads=3"], "hidden_size / num_heads = 128 / 3 = 42.6667"),
        (["model.num_heads=3"], "Try num_heads = 4 or 2 or 1"),
        (["model.hidden_size=100"], "Try a hidden_size that 32 divides"),
        (["model.num_kv_heads=3"], "num_kv_heads = 3 does not divide num_heads = 4"),
        (["model.head_dim=64"], "num_heads * head_dim = 4 * 64 = 256 is not hidden_size = 128"),
        (["model.moe.top_k=9"], "top_k = 9 is more than num_experts = 8"),
        (["model.transformer_fraction=0.3"], "cannot be interleaved"),
        (["training.max_steps=null"], "give max_steps or total_tokens"),
        (["training.min_learning_rate=1"], "min_learning_rate = 1.0 is above learning_rate"),
        (["training.stage=b"], "needs a reasoning variant"),
    ],
)
def test_an_impossible_pair_names_both_and_the_overrides(overrides: list, told: str) -> None:
    (line,) = problems(TINY, *overrides)
    assert line.startswith(f"{TINY} with --set {overrides[0].partition('=')[0]}: ")
    assert told in line


def test_objectives_that_learn_nothing_or_weigh_tokens_twice_are_refused() -> None:
    (line,) = problems(TINY, "objectives.thought=2", "data.token_weights.prompt=0")
    assert "objectives and data.token_weights both weigh tokens" in line
    assert line.endswith("Try data.token_weights=null")
    names = ("text", "fim", "thought", "answer")
    (line,) = problems(TINY, *(f"objectives.{name}=0" for name in names))
    assert "text, fim, prompt, thought and answer are all 0: no next token is learned" in line


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("length_ratios: [1, 2, 4, 8]", "length_ratios: [1, 0]", "a text has one window or more"),
        ("length_ratios: [1, 2, 4, 8]", "length_ratios: [1, 2.5]", "given 2.5"),
        ("length_ratios: [1, 2, 4, 8]", "tasks: [needle]", "given 'needle'"),
        ("backbone_lr_scale: 0.0", "backbone_lr_scale: -0.1", "given -0.1"),
    ],
)
def test_what_stage_b_cannot_train_by_is_refused(
    old: str, new: str, told: str, tmp_path: Path
) -> None:
    text = REASON.read_text(encoding="utf-8")
    assert old in text
    (line,) = problems(written(tmp_path, text.replace(old, new)))
    assert told in line


def test_a_stage_b_without_steps_is_refused() -> None:
    phases = ("memory", "adapter", "policy", "joint")
    (line,) = problems(REASON, *(f"stage_b.training.{phase}_steps=0" for phase in phases))
    assert "are all 0: nothing would be learned. Try training.stage = a" in line


def test_lists_survive_the_json_of_a_checkpoint() -> None:
    config = load_config(REASON)
    assert config.data.mixture is not None and len(config.data.mixture.phases) > 1
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_phases_of_no_steps_do_not_take_place() -> None:
    stage_b = load_config(REASON, ["stage_b.training.policy_steps=0"]).stage_b
    assert stage_b is not None
    assert [phase for phase, _ in stage_b.training.phases] == ["memory", "adapters", "joint"]
    assert stage_b.training.num_steps == sum(steps for _, steps in stage_b.training.phases)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: [1", "line 2, column 6: expected ',' or ']'"),
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' stands here a second time"),
        ("model:\n  x: 1\n  y: 2\n  x: 3", "line 4, column 3: the key 'x' stands here a second"),
        ("a:\tb\n", "line 1, column 3: found character"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: but found another document"),
        ("a: !!python/object:os.system x", "line 1, column 4: tags such as"),
        ("? [a]\n: 1", "line 1, column 3: a key must be a word"),
        ("name: \x07", "character 6 is not allowed in YAML"),
    ],
)
def test_what_is_not_yaml_is_told_with_its_line_and_column(
    text: str, told: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    report = "\n".join(problems(path))
    assert report.startswith(f"{path}: {told}")


def test_the_offending_line_is_shown_with_a_pointer(tmp_path: Path) -> None:
    lines = problems(written(tmp_path, "name: x\nmodel: 3: 4\n"))
    assert lines[1:] == ["  model: 3: 4", "          ^"]


@pytest.mark.parametrize(
    ("text", "told"), [("", "is empty"), ("# x\n", "is empty"), ("3", "given 3")]
)
def test_a_file_without_keys_says_which_it_needs(text: str, told: str, tmp_path: Path) -> None:
    (line,) = problems(written(tmp_path, text))
    assert told in line
    assert "name, model, parallel, training, data" in line


def test_a_missing_file_lists_the_shipped_ones_and_the_nearest() -> None:
    (line,) = problems(Path("configs/cdrmix-core-1B.yaml"))
    assert "no such file" in line
    assert f"Did you mean {shipped('model_configs') / 'cdrmix-core-1b.yaml'}?" in line
    assert all(path.stem in line for path in SHIPPED)


def test_a_folder_and_binary_are_no_config(tmp_path: Path) -> None:
    (line,) = problems(tmp_path)
    assert line.startswith(f"{tmp_path}: cannot be read: Is a directory")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"name: \xff\xfe")
    (line,) = problems(path)
    assert "not UTF-8 text" in line


def test_no_report_speaks_of_pydantic(tmp_path: Path) -> None:
    path = written(tmp_path, "name: 1\nmodel: []\ntraining: {seed: a}\ndata: {path: null}\nx: 1\n")
    report = "\n".join(problems(path))
    assert not re.search(r"pydantic|https?:|Value error|Input should|type=", report)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("launch.environment.A B=1", "'A B' is no name of a variable"),
        ("launch.environment.A=true", "A = True is no text of one line"),
    ],
)
def test_a_variable_of_the_ranks_is_a_name_and_a_text(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(TINY, [override])
    assert load_config(TINY, ["launch.environment.A=1"]).launch.environment == {"A": "1"}


# --- differences ----------------------------------------------------------------------------


def test_changed_keys_name_path_old_and_new() -> None:
    old = load_config(TINY)
    new = load_config(TINY, ["training.seed=5", "model.num_layers=8"])
    assert changed_keys(old, new) == [("model.num_layers", 4, 8), ("training.seed", 1234, 5)]
    assert changed_keys(old.model_dump(), old) == []


def test_a_section_that_went_is_one_change() -> None:
    old, new = load_config(TINY), load_config(TINY, ["model.moe=null", "model.ffn_hidden_size=512"])
    assert old.model.moe is not None
    assert changed_keys(old, new) == [("model.moe", old.model.moe.model_dump(), None)]


def test_a_field_that_an_older_version_did_not_have_stands_at_its_default() -> None:
    config = load_config(TINY)
    older = json.loads(config.model_dump_json())
    del older["evaluation"]["sample_temperature"], older["training"]["memory_share"]
    assert changed_keys(older, config) == []
    warmer = load_config(TINY, ["evaluation.sample_temperature=1.0"])
    assert changed_keys(older, warmer) == [("evaluation.sample_temperature", 0.8, 1.0)]


def test_a_field_that_is_no_more_is_absent_now() -> None:
    config = load_config(TINY)
    older = copy.deepcopy(config.model_dump(mode="json"))
    older["training"]["momentum"] = 0.9
    assert changed_keys(older, config) == [("training.momentum", 0.9, ABSENT)]


def test_a_model_of_billions_of_layers_is_refused_before_they_are_listed() -> None:
    # such a number in a checkpoint of somebody else's would take all memory
    with pytest.raises(
        ConfigError, match="num_layers: given 2000000000, allowed is a whole number"
    ):
        load_config(TINY, ["model.num_layers=2000000000"])

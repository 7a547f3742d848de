"""Recipes: defaults, strictness, and errors that name every problem of a file."""

from pathlib import Path

import pytest

from cdrmix.config.load import config_hash, load_config, shipped
from cdrmix.corpus.inspection import lineage
from cdrmix.corpus.recipe import load_recipe, passes, recipe_yaml
from cdrmix.corpus.recipe_steps import DEFAULT_STEPS, STEPS, identity, make_step, step_class
from cdrmix.data.mixture import built_mixture
from cdrmix.data.shards import TokenizerInfo, new_manifest
from cdrmix.errors import ConfigError
from tests.harness import ROOT

pytest.importorskip("rensa", reason="the [data] extra is not installed")

SOURCE = "sources:\n- {name: a, type: local, path: texts, domain: prose}\n"
SHIPPED = sorted((ROOT / "model_configs" / "data").glob("*.yaml"))


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def problems(file: Path, text: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(file)
    return str(caught.value).replace(str(file), "FILE").splitlines()


def test_everything_but_sources_has_a_default(recipe_file: Path) -> None:
    recipe_file.write_text(SOURCE)
    recipe = load_recipe(recipe_file)
    assert tuple(step.name for step in recipe.steps) == DEFAULT_STEPS
    assert (recipe.tokenizer.path, recipe.shards.validation_share) == (None, 0.01)


def test_a_recipe_written_out_loads_to_an_equal_one(recipe_file: Path) -> None:
    recipe_file.write_text(
        SOURCE + "steps: [normalise, {filter: {domains: [prose], strictness: 0.5}}, dedup]\n"
        "tokenizer: {vocab_size: 1e3}\n"
    )
    recipe = load_recipe(recipe_file)
    recipe_file.write_text(recipe_yaml(recipe))
    assert load_recipe(recipe_file) == recipe
    assert config_hash(load_recipe(recipe_file)) == config_hash(recipe)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_called_what_its_class_is_called(name: str) -> None:
    assert step_class(name).name == name


def test_parameters_reach_the_step(recipe_file: Path) -> None:
    recipe_file.write_text(SOURCE + "steps: [{normalise: {form: NFKC}}, {dedup: {num_bands: 7}}]\n")
    recipe = load_recipe(recipe_file)
    normalise, dedup = recipe.steps
    assert make_step(normalise).form == "NFKC"
    assert list(passes(recipe)) == [([(0, normalise)], (1, dedup)), ([], None)]


def test_domains_restrict_a_step(recipe_file: Path) -> None:
    other = "- {name: b, type: local, path: src, domain: code}\n"
    recipe_file.write_text(SOURCE + other + "steps: [{scrub: {domains: [prose]}}, normalise]\n")
    scrub, normalise = load_recipe(recipe_file).steps
    assert (scrub.takes("prose"), scrub.takes("code")) == (True, False)
    assert normalise.takes("code")


def test_all_problems_of_a_file_are_told_together(recipe_file: Path) -> None:
    lines = problems(
        recipe_file,
        "sources:\n"
        "- {name: A b, type: locale, path: texts, domain: prose, splt: x}\n"
        "- {type: local, path: texts, domain: prose}\n"
        "steps: [normalize, {filter: {strictnes: 1}}, {scrub: 3}, 7]\n"
        "shards: {validation_share: 1}\n"
        "tokeniser: {}\n",
    )
    wanted = [
        "FILE: steps.0: no step 'normalize'. Did you mean 'normalise'?",
        "FILE: steps.1.filter.strictnes: unknown key. Did you mean 'strictness'?",
        "FILE: steps.2.scrub: given 3, allowed are parameters",
        "FILE: steps.3: given 7, allowed is `name` or `name: {parameter: value}`",
        "FILE: sources.0.splt: unknown key. Did you mean 'split'?",
        "FILE: tokeniser: unknown key. Did you mean 'tokenizer'?",
        "FILE: sources.0.name: given 'A b', allowed is text. Short name",
        "FILE: sources.0.type: given 'locale', allowed is one of local, huggingface "
        "(did you mean 'local'?)",
        "FILE: sources.1.name: missing. Give text: Short name",
        "FILE: shards.validation_share: given 1, allowed is a number from 0 and below 1",
    ]
    assert len(lines) == len(wanted)
    for line in wanted:
        assert any(told.startswith(line) for told in lines), line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "FILE: the file is empty; allowed is a section with the keys sources, steps"),
        ("sources: []", "FILE: sources: given a list of 0, allowed are 1 or more"),
        ("sources: texts", "FILE: sources: given 'texts', allowed is a list"),
        ("sources: [texts]", "FILE: sources.0: given 'texts', allowed is a section with"),
        (SOURCE + SOURCE[9:], "FILE: sources: two are named 'a'"),
        (SOURCE + "steps: [{scrub: {domains: [code]}}]", "FILE: steps: scrub: no source has"),
        (SOURCE + "mixture: {phases: [{weights: {web: 1}}]}", "FILE: mixture: no source has the"),
        (SOURCE + "mixture: {phases: [{wights: {}}]}", "FILE: mixture.phases.0.wights: unknown"),
        (SOURCE + "steps: [{filter: {strictness: 2}}]", "FILE: steps.0.filter: filter: strictness"),
        (SOURCE + "steps: [{normalise: {form: 3}}]", "FILE: steps.0.normalise.form: given 3"),
        (SOURCE + "steps: [{blocklist: {hosts: none.txt}}]", "FILE: steps.0.blocklist: none.txt"),
        (SOURCE + "steps: [{dedup: {max_distance: 2}}]", "FILE: steps.0.dedup: max_distance is"),
        (SOURCE + "tokenizer: {path: x, vocab_size: 999}", "FILE: tokenizer: tokenizer.vocab_size"),
        (SOURCE.replace("prose", "prose, encoding: utf-9"), "FILE: sources.0.encoding: 'utf-9' is"),
    ],
)
def test_a_wrong_recipe_is_told_where_and_what_is_allowed(
    recipe_file: Path, text: str, told: str
) -> None:
    (line,) = problems(recipe_file, text)
    assert line.startswith(told)


def test_a_missing_recipe_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file. Did you mean .*python.yaml"):
        load_recipe(tmp_path / "pyton.yaml")


def test_the_configuration_of_a_model_is_no_recipe() -> None:
    model = shipped("model_configs") / "cdrmix-core-tiny.yaml"
    with pytest.raises(ConfigError, match="is the configuration of a model, not a data recipe"):
        load_recipe(model)
    recipe = shipped("model_configs/data") / "python.yaml"
    with pytest.raises(ConfigError, match="is a data recipe, not the configuration") as caught:
        load_config(recipe)
    assert len(str(caught.value).splitlines()) == 1


def test_a_step_with_another_list_is_another_step(recipe_file: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("example.org\n")
    recipe_file.write_text(SOURCE + f"steps: [{{blocklist: {{hosts: {hosts}}}}}]\n")
    (step,) = load_recipe(recipe_file).steps
    before = identity(step)
    assert identity(step) == before
    hosts.write_text("example.com\n")
    assert identity(step) != before


def test_a_mixture_is_found_again_in_the_manifest(recipe_file: Path) -> None:
    recipe_file.write_text(SOURCE + "mixture: {temperature: 2, phases: [{weights: {prose: 1}}]}\n")
    recipe = load_recipe(recipe_file)
    manifest = new_manifest(
        [],
        vocab_size=300,
        tokenizer=TokenizerInfo(file="tokenizer.json", sha256="", num_tokens=300),
        eos_id=0,
        source=lineage(recipe, "mine", [], [], []),
    )
    assert recipe.mixture is not None
    assert built_mixture(manifest) == recipe.mixture


def test_the_recipe_in_the_documentation_loads(recipe_file: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    recipe_file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert len(load_recipe(recipe_file).sources) == 3


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_recipes_load(file: Path) -> None:
    assert load_recipe(file).sources


@pytest.mark.parametrize(
    "file", sorted((ROOT / "model_configs").glob("*.yaml")), ids=lambda file: str(file.stem)
)
def test_each_variant_names_the_recipe_made_for_it(file: Path) -> None:
    config = load_config(file)
    if file.stem.endswith("-tiny"):
        assert config.data.path == "sample" and config.data.recipe is None
        return
    name = "dolma-files" if file.stem == "cdrmix-moe5b" else _recipe_of_size(file.stem)
    assert (config.data.recipe, config.data.path) == (name, f"data/{name}")
    recipe = load_recipe(ROOT / "model_configs" / "data" / f"{name}.yaml")
    mixture = config.data.mixture or recipe.mixture
    assert mixture is not None
    # The last phase anneals, so it must end where the training does, and no earlier.
    assert sum(phase.tokens or 0 for phase in mixture.phases) == config.training.total_tokens
    own = {name for phase in mixture.phases for name in phase.weights or ()}
    assert own == {source.domain for source in recipe.sources}
    assert name == "dolma-files" or "long" in own


def _recipe_of_size(variant: str) -> str:
    _, kind, size = variant.split("-")
    of_size = {"1b": "standard", "4b": "standard", "40b": "extended", "200b": "extended"}
    return "reasoning" if kind == "reason" else of_size[size]


def test_default_steps_with_a_domain_without_profile_show_the_list_to_write(
    recipe_file: Path,
) -> None:
    sources = SOURCE.replace("prose", "legal") + "- {name: b, type: local, path: b, domain: acts}\n"
    (line,) = problems(recipe_file, sources)
    assert line.startswith("FILE: steps: left out, so the default steps are taken, and filter")
    assert "'acts', 'legal'" in line
    steps = "steps: [normalise, url, boilerplate, {filter: {profiles: {acts: web, legal: web}}}, "
    assert f"{steps}scrub, dedup]" in line
    recipe_file.write_text(sources + line[line.index("steps: [") :].partition("]")[0] + "]\n")
    assert tuple(step.name for step in load_recipe(recipe_file).steps) == DEFAULT_STEPS


def test_a_domain_without_profile_is_told_at_the_filter_that_takes_it(recipe_file: Path) -> None:
    source = SOURCE.replace("prose", "legal")
    (line,) = problems(recipe_file, source + "steps: [normalise, filter]\n")
    assert line.startswith("FILE: steps.1.filter: filter: domain 'legal' has no profile. Set one")
    recipe_file.write_text(source + "steps: [{filter: {profiles: {legal: prose}}}]\n")
    assert load_recipe(recipe_file)


def test_mistakes_between_the_parts_are_told_with_those_inside_them(
    recipe_file: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    recipe_file.write_text(
        f"sources:\n- {{name: a, type: local, path: {tmp_path}/none, domain: legal}}\n"
        f"- {{name: b, type: local, path: {here}, domain: prose}}\n"
        "steps: [normalize, filter, {scrub: {domains: [prise]}}, {dedup: {max_distance: 2}}]\n"
        "tokenizer: {path: nowhere}\n"
        "mixture: {phases: [{weights: {web: 1, legal: 1}, tokens: 9}, {weights: {web: 1, x: 1}}]}\n"
        "shards: {validation_share: 1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, for_build=True)
    lines = str(caught.value).replace(str(recipe_file), "FILE").splitlines()
    wanted = [
        "FILE: steps.0: no step 'normalize'.",
        "FILE: steps.3.dedup: max_distance is not",
        "FILE: shards.validation_share: given 1",
        "FILE: steps: scrub: no source has the domain 'prise'. Domains of the sources: legal,",
        "FILE: mixture: no source has the domain 'web'.",
        "FILE: mixture: no source has the domain 'x'.",
        "FILE: steps.1.filter: filter: domain 'legal' has no profile.",
        f"FILE: sources.0.path: source 'a': {tmp_path}/none: no such file or folder.",
        "FILE: tokenizer.path: nowhere/tokenizer.json: cannot be read",
    ]
    assert len(lines) == len(wanted)
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith(start)


def test_a_wrong_source_does_not_make_domains_unknown_or_a_filter_wrong(recipe_file: Path) -> None:
    other = "- {name: B, type: local, path: b, domain: web}\n"
    text = "steps: [{filter: {strictness: 2}}]\nmixture: {phases: [{weights: {web: 1}}]}\n"
    lines = problems(recipe_file, SOURCE.replace("prose", "legal") + other + text)
    assert [line.split(" ")[1] for line in lines] == ["steps.0.filter:", "sources.1.name:"]

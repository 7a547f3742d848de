"""The data recipe: which sources become token shards, by which steps.

Its YAML is as strict as a training configuration's: unknown keys, parameters that a step does not
have and values of another kind are told together, each with its place and what is allowed.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import Field, create_model, model_validator

from cdrmix.config.load import read_config_text
from cdrmix.config.model import Section
from cdrmix.config.problems import Problem, alternatives, shown, validate
from cdrmix.config.schema import MixtureConfig
from cdrmix.config.yaml_text import dump_yaml, parse_yaml
from cdrmix.corpus.source import SourceConfig
from cdrmix.data.document import FimConfig
from cdrmix.data.shards import MAX_SHARD_TOKENS
from cdrmix.errors import ConfigError, TrainingError

# The name of a step in a recipe -> the class that does it, imported when a recipe asks for it.
STEPS = {
    "blocklist": "cdrmix.corpus.steps.url:Blocklist",
    "boilerplate": "cdrmix.corpus.steps.normalise:Boilerplate",
    "dedup": "cdrmix.corpus.corpus_steps:Dedup",
    "filter": "cdrmix.corpus.steps.filter:Filter",
    "length": "cdrmix.corpus.steps.normalise:Length",
    "language": "cdrmix.corpus.steps.language:Language",
    "normalise": "cdrmix.corpus.steps.normalise:Normalise",
    "scrub": "cdrmix.corpus.steps.scrub:Scrub",
    "url": "cdrmix.corpus.steps.url:Url",
    "url_dedup": "cdrmix.corpus.corpus_steps:UrlDedup",
}
DEFAULT_STEPS = ("normalise", "url", "boilerplate", "filter", "scrub", "dedup")


class StepConfig(Section):
    """One step and what it is told."""

    name: str = Field(description="Name of a step.")
    domains: tuple[str, ...] | None = Field(
        None, description="Domains whose documents take this step; null: all of them."
    )
    parameters: dict[str, Any] = Field({}, description="Parameters of the step, all of them.")

    def takes(self, domain: str) -> bool:
        """Whether documents of a domain take this step."""
        return self.domains is None or domain in self.domains


class TokenizerConfig(Section):
    """The tokenizer that texts are encoded with: trained on the corpus, or taken as it is."""

    path: str | None = Field(
        None, description="Folder with a tokenizer.json that this package has trained; null: train."
    )
    vocab_size: int | None = Field(
        None, ge=266, description="Slots of a tokenizer that is trained; null: 50,272."
    )
    training_bytes: int = Field(
        100_000_000, ge=1, description="Text that it is trained on, spread over the corpus (bytes)."
    )

    @model_validator(mode="after")
    def _one_vocabulary(self) -> TokenizerConfig:
        if self.path is not None and self.vocab_size is not None:
            raise ValueError("tokenizer.vocab_size is for training one; remove it, or path")
        return self


class ShardsConfig(Section):
    """How tokens are laid down."""

    validation_share: float = Field(
        0.01, ge=0, lt=1, description="Share of the documents held out, by hash of their id."
    )
    max_tokens: int = Field(
        MAX_SHARD_TOKENS, ge=1, le=2**31 - 1, description="Largest shard (tokens)."
    )


class Recipe(Section):
    """From sources to token shards."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1, description="Where texts are from.")
    steps: tuple[StepConfig, ...] = Field(
        description="What is done with each document, in order; when left out: "
        f"{', '.join(DEFAULT_STEPS)}."
    )
    tokenizer: TokenizerConfig = TokenizerConfig()
    mixture: MixtureConfig | None = Field(
        None,
        description="Shares of the domains in training, where the run has no data.mixture of its "
        "own; null: every sample once per epoch.",
    )
    fim: FimConfig | None = Field(
        None, description="Rearrange training documents for infilling; null: none."
    )
    shards: ShardsConfig = ShardsConfig()
    keep_dropped: bool = Field(
        False, description="Keep every dropped document, whole, in dropped.jsonl of the result."
    )

    @model_validator(mode="after")
    def _names_are_known(self) -> Recipe:
        names = [source.name for source in self.sources]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"sources: two are named '{doubled[0]}'; ids of documents need one")
        users = [(f"steps: {step.name}", step.domains or ()) for step in self.steps]
        phases = self.mixture.phases if self.mixture else ()
        users += [("mixture", tuple(phase.weights or ())) for phase in phases]
        users += [("fim", self.fim.domains or ())] if self.fim else []
        known = {source.domain for source in self.sources}
        for user, domains in users:
            unknown = sorted(set(domains) - known)
            if unknown:
                raise ValueError(
                    f"{user}: no source has the domain '{unknown[0]}'. "
                    f"Known: {', '.join(sorted(known))}"
                )
        return self


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a YAML file, every default filled in.

    Raises:
        ConfigError: naming every problem of the file, one to a line.
    """
    path = Path(path)
    values = parse_yaml(read_config_text(path, folder="model_configs/data"), place=str(path))
    problems: list[Problem] = []
    if isinstance(values, dict) and isinstance(values.get("steps", []), list):
        steps = [
            _step(entry, ("steps", str(number)), problems)
            for number, entry in enumerate(values.get("steps", DEFAULT_STEPS))
        ]
        values = values | {"steps": [step for step in steps if step is not None]}
    recipe, found = validate(values, Recipe)
    problems += found
    if recipe is None or problems:
        raise ConfigError("\n".join(_placed(problem, path) for problem in problems))
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults in it; loads to an equal recipe."""
    values = recipe.model_dump(mode="json")
    values["steps"] = [
        {step.name: ({"domains": list(step.domains)} if step.domains else {}) | step.parameters}
        for step in recipe.steps
    ]
    return dump_yaml(values)


def make_step(config: StepConfig) -> Any:
    """The step that an entry of a recipe asks for: a `Step` or a `CorpusStep`."""
    return step_class(config.name)(**config.parameters)


def identity(config: StepConfig) -> Any:
    """What a step's results follow from: its entry, and the content of files that it names."""
    fields = _parameter_section(config.name).model_fields
    files = {
        name: hashlib.sha256(Path(value).read_bytes()).hexdigest()
        for name, value in config.parameters.items()
        if value is not None and Path in alternatives(fields[name].annotation)
    }
    return [config.model_dump(), files]


def is_corpus_step(config: StepConfig) -> bool:
    """Whether a step looks at the whole corpus (`cdrmix.corpus.corpus_steps.CorpusStep`)."""
    return hasattr(step_class(config.name), "decide")


def step_class(name: str) -> type[Any]:
    """Class of the step with a name in `STEPS`.

    Raises:
        ConfigError: if a package that it needs is not installed.
    """
    module, _, attribute = STEPS[name].partition(":")
    try:
        found: type[Any] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"step '{name}' needs the package '{error.name}': pip install 'cdrmix[data]'"
        ) from None
    return found


def _placed(problem: Problem, file: Path) -> str:
    return f"{file}: {'.'.join(problem.path)}{': ' if problem.path else ''}{problem.text}"


def _step(entry: Any, path: tuple[str, ...], problems: list[Problem]) -> dict[str, Any] | None:
    """An entry of `steps`, either `name` or `{name: parameters}`, as a StepConfig's values."""
    if isinstance(entry, str):
        name = entry
        given = None
    elif isinstance(entry, dict) and len(entry) == 1:
        name, given = next(iter(entry.items()))
    else:
        text = f"given {shown(entry)}, allowed is `name` or `name: {{parameter: value}}`"
        problems.append(Problem(path, text))
        return None
    if name not in STEPS:
        near = difflib.get_close_matches(str(name), STEPS, n=1)
        advice = f" Did you mean '{near[0]}'?" if near else ""
        problems.append(Problem(path, f"no step '{name}'.{advice} Known: {', '.join(STEPS)}"))
        return None
    if given is not None and not isinstance(given, dict):
        problems.append(Problem((*path, name), f"given {shown(given)}, allowed are parameters"))
        return None
    try:
        section = _parameter_section(name)
    except ConfigError as error:
        problems.append(Problem((*path, name), str(error)))
        return None
    parameters = dict(given or {})
    values = {"name": name}
    if "domains" not in section.model_fields and "domains" in parameters:
        values["domains"] = parameters.pop("domains")
    checked = _parameters(name, section, parameters, (*path, name), problems)
    return values | {"parameters": checked}


def _parameters(
    name: str,
    section: type[Section],
    given: dict[str, Any],
    path: tuple[str, ...],
    problems: list[Problem],
) -> dict[str, Any]:
    """All parameters of a step, checked against its constructor and by it."""
    parameters, found = validate(given, section)
    problems += [Problem(path + problem.path, problem.text) for problem in found]
    if parameters is None:
        return {}
    try:
        step_class(name)(**{key: getattr(parameters, key) for key in section.model_fields})
    except (TrainingError, ValueError) as error:
        problems.append(Problem(path, str(error)))
    return parameters.model_dump(mode="json")


def _parameter_section(name: str) -> type[Section]:
    """The keyword parameters of a step's constructor, as a section."""
    constructor = step_class(name).__init__
    hints = get_type_hints(constructor)
    fields: dict[str, Any] = {
        parameter.name: (
            hints[parameter.name],
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in inspect.signature(constructor).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return create_model(name, __base__=Section, **fields)

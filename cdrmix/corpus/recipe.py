"""The data recipe: the sources and the steps that make a data set.

Its YAML is as strict as a training configuration: unknown keys, unknown parameters of a step and
values of a wrong type are reported together, each with its place and the allowed values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from cdrmix.config.load import read_config_text, shipped
from cdrmix.config.plugin import is_plugin
from cdrmix.config.plugin_folder import with_plugin_folder, with_used_plugins
from cdrmix.config.problems import AnySection, Problem, validate
from cdrmix.config.schema import MixtureConfig
from cdrmix.config.section import Section
from cdrmix.config.yaml_text import dump_yaml, parse_yaml
from cdrmix.corpus.recipe_steps import (
    DEFAULT_STEPS,
    Numbered,
    StepConfig,
    ValidatorConfig,
    make_step,
    read_step,
    step_class,
)
from cdrmix.corpus.source import SourceConfig, missing_path
from cdrmix.corpus.steps.filter import PROFILE_OF_DOMAIN, PROFILES, Filter
from cdrmix.corpus.text_source import source_plugin
from cdrmix.data.document import DocumentStep, FimConfig
from cdrmix.data.shards import MAX_SHARD_TOKENS
from cdrmix.data.tokenizer import Choices, load_tokenizer
from cdrmix.data.tokenizer_base import (
    CHAIN_ROLES,
    FIM_ROLES,
    ROLES_OF_TOKENS,
    missing_roles,
)
from cdrmix.errors import ConfigError, DataError
from cdrmix.hooks.plugin import make_plugin


class RolesConfig(Section):
    """Tokens of a tokenizer that this package has not trained, by their role in documents."""

    thought: str | None = Field(None, description="Begins the thought of a chain of thought.")
    answer: str | None = Field(None, description="Begins the answer.")
    fim_prefix: str | None = Field(None, description="Begins a document with infilling.")
    fim_suffix: str | None = Field(None, description="Begins what comes behind the gap.")
    fim_middle: str | None = Field(None, description="Begins what is to be filled in.")
    memory: str | None = Field(None, description="Stands for a segment of memory in Stage B.")


class TokenizerConfig(Section):
    """The tokenizer of a data set: trained on the corpus, or an existing one."""

    path: str | None = Field(
        None,
        description="Folder with a tokenizer.json, of this package or of a model of Hugging Face; "
        "null: train.",
    )
    # The next three are left out where they say nothing, so that folders of recipes without them
    # stay theirs.
    eos_token: str | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="Token that ends each document; null: as the files of that folder say.",
    )
    add_bos: bool | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="Begin each document with BOS; null: as that tokenizer does with a text.",
    )
    roles: RolesConfig = Field(
        RolesConfig(),
        exclude_if=lambda value: value == RolesConfig(),
        description="Its tokens for parts of documents, those that are not known by their names.",
    )
    # At least 256 bytes and 10 special tokens.
    vocab_size: int | None = Field(
        None, ge=266, description="Slots of a tokenizer that is trained; null: 50,272."
    )
    training_bytes: int = Field(
        100_000_000, ge=1, description="Size of its training text, spread over the corpus (bytes)."
    )

    @model_validator(mode="after")
    def _one_vocabulary(self) -> TokenizerConfig:
        if self.path is not None and self.vocab_size is not None:
            raise ValueError("tokenizer.vocab_size is for training one; remove it, or path")
        if self.path is None and self.choices() != Choices():
            raise ValueError(
                "tokenizer.eos_token, add_bos and roles are for an existing one; give path too"
            )
        return self

    def choices(self) -> Choices:
        """Returns what the recipe says about special tokens."""
        named = ((role, getattr(self.roles, role)) for role in ROLES_OF_TOKENS)
        roles = {role: token for role, token in named if token is not None}
        return Choices(eos_token=self.eos_token, add_bos=self.add_bos, roles=roles)


class ShardsConfig(Section):
    """Size of the shards and of the validation split."""

    validation_share: float = Field(
        0.01, ge=0, lt=1, description="Share of the documents held out, by hash of their id."
    )
    # Lengths of documents within a shard are int32.
    max_tokens: int = Field(
        MAX_SHARD_TOKENS, ge=1, le=2**31 - 1, description="Largest shard (tokens)."
    )


class Recipe(Section):
    """All settings of a data build."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1, description="Sources of the texts.")
    steps: tuple[StepConfig, ...] = Field(
        description=f"Steps for each document, in order; default: {', '.join(DEFAULT_STEPS)}."
    )
    validators: tuple[ValidatorConfig, ...] = Field(
        (),
        exclude_if=lambda value: not value,
        description="Checks of yours, in order, of the documents that the steps pass on.",
    )
    # The files have digests of their own: the folder may move.
    plugins: str | None = Field(
        None,
        exclude=True,
        description="Folder of Python files of yours, whose classes steps, sources and validators "
        "name as module:Name; null: `plugins` beside this file, where there is one.",
    )
    tokenizer: TokenizerConfig = TokenizerConfig()
    mixture: MixtureConfig | None = Field(
        None,
        description="Shares of the domains in training, unless the run sets data.mixture; null: "
        "every sample once per epoch.",
    )
    fim: FimConfig | None = Field(
        None, description="Rearrange training documents for infilling; null: none."
    )
    shards: ShardsConfig = ShardsConfig()
    keep_dropped: bool = Field(
        False, description="Keep every dropped document, whole, in dropped.jsonl of the result."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Recipe:
        names = [source.name for source in self.sources]
        # The name of the source begins the id of each of its documents.
        twins = sorted({name for name in names if names.count(name) > 1})
        if twins:
            raise ValueError(f"sources: two are named '{twins[0]}'; ids of documents need one")
        return self

    @property
    def stages(self) -> tuple[StepConfig, ...]:
        """Returns the steps, and the validators behind them."""
        checks = (
            StepConfig(
                name=each.use, domains=each.domains, parameters=each.options, action=each.action
            )
            for each in self.validators
        )
        return (*self.steps, *checks)


def load_recipe(path: str | Path, *, for_build: bool = False) -> Recipe:
    """Loads a recipe from a YAML file and fills in all defaults.

    Args:
        for_build: paths of local sources and of the tokenizer must exist on this machine.
    Raises:
        ConfigError: names every problem of the file, one to a line.
    """
    path = Path(path)
    values = parse_yaml(read_config_text(path, folder="model_configs/data"), place=str(path))
    if isinstance(values, dict) and "model" in values and "sources" not in values:
        raise ConfigError(
            f"{path}: is the configuration of a model, not a data recipe, which lists `sources`. "
            f"Shipped recipes are in {shipped('model_configs/data')}"
        )
    values = with_used_plugins(with_plugin_folder(values, path))
    problems: list[Problem] = []
    parts = _Parts(is_default="steps" not in values if isinstance(values, dict) else False)
    # Steps come first: their parameters depend on their classes, which the schema does not know.
    if isinstance(values, dict) and isinstance(values.get("steps", []), list):
        steps = []
        for number, entry in enumerate(values.get("steps", DEFAULT_STEPS)):
            step, found = read_step(entry, ("steps", str(number)))
            problems += found
            if step is not None:
                steps.append(step)
            # One with a wrong parameter is not judged further: it was meant otherwise.
            if not found and (config := _valid(step, StepConfig)):
                parts.steps.append((number, config))
        values = values | {"steps": steps}
    recipe, others = validate(values, Recipe)
    problems += others
    problems += _plugin_problems(values)
    # Told with the others, so that a recipe is not mended in one round for each kind of mistake.
    if isinstance(values, dict):
        parts.read(values)
        problems += [*parts.unknown_domains(), *parts.without_profile()]
        problems += parts.missing_paths() if for_build else []
    if recipe is None or problems:
        lines = (
            f"{path}: {'.'.join(problem.path)}{': ' if problem.path else ''}{problem.text}"
            for problem in problems
        )
        raise ConfigError("\n".join(lines))
    return recipe


def _valid(values: Any, section: type[AnySection]) -> AnySection | None:
    """Returns a section of these values, or None if something is wrong with them."""
    return validate(values, section)[0] if isinstance(values, dict) else None


@dataclass
class _Parts:
    """The parts of a recipe that are right by themselves, to be compared with each other.

    Attributes:
        is_default: the recipe has no `steps`, so that there is no place to set a parameter in.
        sources, steps: with their places in the recipe.
        all_sources: every source of the recipe is among them.
    """

    is_default: bool
    steps: list[Numbered] = field(default_factory=list)
    sources: list[tuple[int, SourceConfig]] = field(default_factory=list)
    all_sources: bool = False
    validators: list[ValidatorConfig] = field(default_factory=list)
    tokenizer: TokenizerConfig | None = None
    mixture: MixtureConfig | None = None
    fim: FimConfig | None = None

    def read(self, values: dict[str, Any]) -> None:
        """Takes all parts but the steps, which their reader adds."""
        entries = values.get("sources")
        entries = entries if isinstance(entries, list) else []
        for number, entry in enumerate(entries):
            if source := _valid(entry, SourceConfig):
                self.sources.append((number, source))
        checks = values.get("validators")
        found = (
            (_valid(each, ValidatorConfig) for each in checks or ())
            if isinstance(checks, list)
            else ()
        )
        self.validators = [each for each in found if each]
        self.all_sources = 0 < len(self.sources) == len(entries)
        self.tokenizer = _valid(values.get("tokenizer"), TokenizerConfig)
        self.mixture = _valid(values.get("mixture"), MixtureConfig)
        self.fim = _valid(values.get("fim"), FimConfig)

    def unknown_domains(self) -> list[Problem]:
        """Returns a problem for each domain that no source has."""
        if not self.all_sources:
            return []
        users = [(f"steps: {step.name}", step.domains or ()) for _, step in self.steps]
        users += [(f"validators: {check.use}", check.domains or ()) for check in self.validators]
        phases = self.mixture.phases if self.mixture else ()
        users += [("mixture", tuple(phase.weights or ())) for phase in phases]
        users += [("fim", self.fim.domains or ())] if self.fim else []
        # A misspelt domain would make a step, a weight or infilling silently apply to nothing.
        known = {source.domain for _, source in self.sources}
        texts = (
            f"{user}: no source has the domain '{domain}'. "
            f"Domains of the sources: {', '.join(sorted(known))}"
            for user, domains in users
            for domain in sorted(set(domains) - known)
        )
        return [Problem((), text) for text in dict.fromkeys(texts)]  # phases repeat a domain

    def without_profile(self) -> list[Problem]:
        """Returns the problems of domains that a filter takes and has no profile for."""
        problems: list[Problem] = []
        domains = sorted({source.domain for _, source in self.sources})
        for number, step in self.steps:
            if step.name != Filter.name:
                continue
            told: dict[str, str] = {}
            for domain in filter(step.takes, domains):
                try:
                    make_step(step).profile_of(domain)
                except DataError as error:
                    told[domain] = str(error)
            if told and self.is_default:
                problems.append(Problem(("steps",), _steps_to_write(list(told))))
            else:
                path = ("steps", str(number), step.name)
                problems += [Problem(path, text) for text in told.values()]
        return problems

    def missing_paths(self) -> list[Problem]:
        """Returns a problem for each path that is not there or not what it should be."""
        problems = [
            Problem(("sources", str(number), "path"), text)
            for number, source in self.sources
            if source.type == "local" and (text := missing_path(source))
        ]
        if self.tokenizer and self.tokenizer.path is not None:
            try:
                tokenizer = load_tokenizer(Path(self.tokenizer.path), self.tokenizer.choices())
            except DataError as error:
                problems.append(Problem(("tokenizer", "path"), str(error)))
            else:
                chains = any(source.chain_of_thought for _, source in self.sources)
                needed = (*(CHAIN_ROLES if chains else ()), *(FIM_ROLES if self.fim else ()))
                if missing := [role for role in needed if role not in tokenizer.roles]:
                    problems.append(Problem(("tokenizer", "path"), missing_roles(missing)))
        return problems


def _steps_to_write(domains: list[str]) -> str:
    """Says how to give the filter of the default steps a profile for these domains."""
    profiles = ", ".join(f"{domain}: {PROFILES[0]}" for domain in domains)
    with_profiles = f"{{{Filter.name}: {{profiles: {{{profiles}}}}}}}"
    steps = (with_profiles if name == Filter.name else name for name in DEFAULT_STEPS)
    return (
        f"left out, so the default steps are taken, and {Filter.name} is one of them, which has no "
        f"profile for {', '.join(map(repr, domains))}. Write them out with one, such as "
        f"steps: [{', '.join(steps)}]; profiles: {', '.join(PROFILES)}. Or give the source a "
        f"domain that has one: {', '.join(sorted(PROFILE_OF_DOMAIN))}."
    )


def _plugin_problems(values: Any) -> list[Problem]:
    """Returns the problems of sources and validators of a user's: classes and options."""
    problems: list[Problem] = []
    for key, section in (("sources", SourceConfig), ("validators", ValidatorConfig)):
        entries = values.get(key) if isinstance(values, dict) else None
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            config = _valid(entry, section)
            try:
                if isinstance(config, ValidatorConfig):
                    make_plugin(config, DocumentStep, where="")
                elif isinstance(config, SourceConfig) and config.is_plugin:
                    source_plugin(config)
            except ConfigError as error:
                problems.append(Problem((key, str(number)), str(error)))
    return problems


def passes(recipe: Recipe) -> Iterator[tuple[list[Numbered], Numbered | None]]:
    """Cuts the steps after each that looks at the whole corpus; yields (those before, that one)."""
    steps: list[Numbered] = []
    for numbered in enumerate(recipe.stages):
        name = numbered[1].name
        # a `dedup_steps.CorpusStep`, of which a user has none
        if not is_plugin(name) and hasattr(step_class(name), "decide"):
            yield steps, numbered
            steps = []
        else:
            steps.append(numbered)
    yield steps, None


def recipe_yaml(recipe: Recipe) -> str:
    """Returns the recipe as YAML with all defaults; loading it gives an equal recipe."""
    # A step has one parameter `domains` at most: its own, or that of the entry.
    values = recipe.model_dump(mode="json")
    values["steps"] = [
        {"use": step.name, "options": step.parameters, "domains": step.domains}
        if is_plugin(step.name)
        else {
            step.name: ({"domains": list(step.domains)} if step.domains else {}) | step.parameters
        }
        for step in recipe.steps
    ]
    return dump_yaml(values | ({"plugins": recipe.plugins} if recipe.plugins else {}))

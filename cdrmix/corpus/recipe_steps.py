"""Entries of a recipe that name a step or a validator: their parameters, classes and identity."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

from cdrmix.config.plugin import NamesPlugins, PluginConfig, is_plugin
from cdrmix.config.problems import Problem, alternatives, shown, validate
from cdrmix.config.section import Section
from cdrmix.corpus.plugin_step import PluginStep
from cdrmix.data.document import DocumentStep
from cdrmix.errors import ConfigError, TrainingError
from cdrmix.hooks.plugin import make_plugin, plugin_class, plugin_digest

# Class of each step, by its name in a recipe. Imported only for a recipe that uses it, since some
# need packages of the [data] extra.
STEPS = {
    "blocklist": "cdrmix.corpus.steps.url:Blocklist",
    "boilerplate": "cdrmix.corpus.steps.normalise:Boilerplate",
    "dedup": "cdrmix.corpus.dedup_steps:Dedup",
    "filter": "cdrmix.corpus.steps.filter:Filter",
    "length": "cdrmix.corpus.steps.normalise:Length",
    "language": "cdrmix.corpus.steps.language:Language",
    "normalise": "cdrmix.corpus.steps.normalise:Normalise",
    "scrub": "cdrmix.corpus.steps.scrub:Scrub",
    "url": "cdrmix.corpus.steps.url:Url",
    "url_dedup": "cdrmix.corpus.dedup_steps:UrlDedup",
}
# Clean text first, since all later steps compare it; duplicates last, since their search is the
# most expensive step and sees the fewest documents there.
DEFAULT_STEPS = ("normalise", "url", "boilerplate", "filter", "scrub", "dedup")


# Drops a document that is not valid, or stops the build.
Action = Literal["drop", "stop"]


class PluginStepConfig(PluginConfig):
    """A step of a user's."""

    domains: tuple[str, ...] | None = Field(
        None, description="Domains whose documents take this step; null: all of them."
    )


class ValidatorConfig(PluginStepConfig):
    """A check of the documents that all steps have passed on."""

    action: Action = Field(
        "drop", description="drop: a document that is not valid. stop: the build."
    )


class StepConfig(Section):
    """One step with its parameters."""

    name: Annotated[str, NamesPlugins()] = Field(description="Name of a step, or a class of yours.")
    domains: tuple[str, ...] | None = Field(
        None, description="Domains whose documents take this step; null: all of them."
    )
    parameters: dict[str, Any] = Field({}, description="Parameters of the step, all of them.")
    # Left out where it says nothing, so that folders of recipes without it stay theirs.
    action: Action | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="Of a validator: what becomes of a document that is not valid.",
    )

    def takes(self, domain: str) -> bool:
        """Returns True if documents of the domain take this step."""
        return self.domains is None or domain in self.domains


# A step and its place in the recipe.
Numbered = tuple[int, StepConfig]


def read_step(entry: Any, path: tuple[str, ...]) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Returns the values of a `StepConfig` for an entry of `steps`, and its problems.

    Args:
        entry: `name`, `{name: parameters}`, or `{use: package.module:Name, options: ...}`.
        path: place of the entry in the recipe.
    """
    if isinstance(entry, dict) and "use" in entry:
        return _read_plugin_step(entry, path)
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        text = (
            f"given {shown(entry)}, allowed is `name` or `name: {{parameter: value}}`, or for a "
            "step of your own `use: package.module:Name`"
        )
        return None, [Problem(path, text)]
    [(name, parameters)] = entry.items()
    if name not in STEPS:
        near = difflib.get_close_matches(str(name), STEPS, n=1)
        advice = f" Did you mean '{near[0]}'?" if near else ""
        return None, [Problem(path, f"no step '{name}'.{advice} Known: {', '.join(STEPS)}")]
    path = (*path, name)
    if parameters is not None and not isinstance(parameters, dict):
        return None, [Problem(path, f"given {shown(parameters)}, allowed are parameters")]
    try:
        section = _parameter_section(name)
    except ConfigError as error:
        return None, [Problem(path, str(error))]
    parameters = dict(parameters or {})
    values: dict[str, Any] = {"name": name, "parameters": {}}
    # `domains` belongs to the entry, except where the step has a parameter of that name.
    if "domains" not in section.model_fields and "domains" in parameters:
        values["domains"] = parameters.pop("domains")
    section_values, others = validate(parameters, section)
    problems = [Problem(path + problem.path, problem.text) for problem in others]
    if section_values is not None:
        # The constructor checks what types cannot: ranges, and parameters that exclude others.
        try:
            step_class(name)(**{key: getattr(section_values, key) for key in section.model_fields})
        except (TrainingError, ValueError) as error:
            problems.append(Problem(path, str(error)))
        values["parameters"] = section_values.model_dump(mode="json")
    return values, problems


def _read_plugin_step(
    entry: dict[str, Any], path: tuple[str, ...]
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Returns what `read_step` does, for a step of a user's."""
    step, others = validate(entry, PluginStepConfig)
    problems = [Problem(path + problem.path, problem.text) for problem in others]
    if step is None:
        return None, problems
    try:
        make_plugin(step, DocumentStep, where="")
    except ConfigError as error:
        problems.append(Problem(path, str(error)))
    values = step.model_dump()
    return {"name": values["use"], "domains": step.domains, "parameters": step.options}, problems


def _parameter_section(name: str) -> type[Section]:
    """Returns the keyword parameters of a step's constructor as a section."""
    constructor = step_class(name).__init__
    hints = get_type_hints(constructor)
    fields: dict[str, Any] = {}
    for name_of_field, parameter in inspect.signature(constructor).parameters.items():
        # Steps take their parameters by keyword, so `self` and the like are left out here.
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name_of_field] = (hints[name_of_field], default)
    return create_model(name, __base__=Section, **fields)


def step_class(name: str) -> type[Any]:
    """Imports the class of a step in `STEPS`, or of a user's.

    Raises:
        ConfigError: if a package that it needs is not installed, or a user's is no step.
    """
    if is_plugin(name):
        return plugin_class(name, DocumentStep, where="steps")
    module, _, attribute = STEPS[name].partition(":")
    try:
        step: type[Any] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"step '{name}' needs the package '{error.name}': pip install 'cdrmix[data]'"
        ) from None
    return step


def make_step(config: StepConfig) -> Any:
    """Makes the `Step` or `CorpusStep` of an entry of a recipe."""
    if is_plugin(config.name):
        plugin = PluginConfig(use=config.name, options=config.parameters)
        step = make_plugin(plugin, DocumentStep, where=f"steps: {config.name}")
        return PluginStep(config.name, step, config.action)
    return step_class(config.name)(**config.parameters)


def identity(config: StepConfig) -> Any:
    """Returns all inputs of a step: its entry, and the digests of the files that it names and of
    a user's code."""
    # The content of a file, such as a blocklist, may change while its path stays.
    if is_plugin(config.name):
        options = getattr(step_class(config.name), "Options", None)
        fields = options.model_fields if options else {}
        digest = [plugin_digest(config.name)]
    else:
        fields = _parameter_section(config.name).model_fields
        digest = []
    files = {
        name: hashlib.sha256(Path(value).read_bytes()).hexdigest()
        for name, value in config.parameters.items()
        if value is not None and Path in alternatives(fields[name].annotation)
    }
    return [config.model_dump(), files, *digest]

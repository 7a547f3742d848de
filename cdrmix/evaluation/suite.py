"""Suites of evaluations: what one is, and the list of them by name.

A suite adds one file and one line in `SUITES`. Its `check` runs before torch is imported and a
model is loaded, so that a missing file is told in a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from cdrmix.config.evaluation import EvaluationConfig, SuiteConfig, SuiteName
from cdrmix.config.plugin import PluginConfig, is_plugin, label_of
from cdrmix.hooks.plugin import make_plugin, plugin_digest
from cdrmix.monitoring.suite_results import Row, SuiteResult

if TYPE_CHECKING:
    from cdrmix.config.schema import Config
    from cdrmix.data.tokenizer import Tokenizer
    from cdrmix.models.backbone import LanguageModel
    from cdrmix.parallel.topology import Topology

# name: module and class
SUITES: dict[str, tuple[str, str]] = {
    "perplexity": ("cdrmix.evaluation.suites.perplexity", "Perplexity"),
    "zero-shot": ("cdrmix.evaluation.suites.zero_shot", "ZeroShot"),
    "code": ("cdrmix.evaluation.suites.code", "Code"),
    "infill": ("cdrmix.evaluation.suites.infill", "Infill"),
    "routing": ("cdrmix.evaluation.suites.routing", "Routing"),
    # Of a row above this package, which may know it by name alone.
    "reasoning": ("cdrmix.stage_b.reasoning_suite", "Reasoning"),
}


@dataclass(frozen=True)
class Request:
    """Wishes of a user for one evaluation.

    Attributes:
        tasks: folder or file of tasks; None: those that come with the suite.
        limit: most examples of each task (count); None: all, or as many as the suite says.
        data: built folder, or its URL, with held-out text; None: that of the training. A suite
            reads `Judged.data`, which is this one where it is given.
        seed: of what is drawn.
        execute_code, sandbox: as of the configuration's `evaluation`.
        options: further flags that one suite knows, such as `window`: those of `--option
            NAME=VALUE`, of which the command line takes the names in the suite's `options` alone,
            and `max_tokens`, `write_tasks`, `controls`, `held_out_wording`, `lengths`, `branches`
            and `accept_threshold` of its own flags.
    """

    tasks: Path | None = None
    limit: int | None = None
    data: str | None = None
    seed: int = 0
    execute_code: bool = False
    sandbox: str = "kernel"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judged:
    """Model that suites judge, the same on all ranks of its layout.

    Attributes:
        model: in its layout; all ranks call it equally often, with inputs of equal shape where
            they hold parts of one sample.
        max_length: most tokens of an input.
        batch_size: samples of a forward pass, which changes nothing but the time.
        source: as of `SuiteResult`, and so is `step`.
        data: built folder with held-out text, verified: that of the request, or else of the
            training; None: not there.
        tokenizer_digest: sha256 of the file of the tokenizer that the model was trained with, hex,
            as the manifest of a data set has it; another one there means that its token ids are
            not those of `tokenizer`. None: not known.
        no_data: message of the error of a suite that needs `data`, where there is none.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    config: Config
    topology: Topology
    max_length: int
    batch_size: int
    source: str
    step: int | None
    weights: str
    data: Path | None
    tokenizer_digest: str | None = None
    no_data: str = "give --data DIR, a built folder with held-out text"

    def result(self, suite: SuiteName, rows: list[Row], **more: Any) -> SuiteResult:
        """Returns rows of a suite on this model; `more` are further fields of `SuiteResult`."""
        about: dict[str, Any] = {"source": self.source, "step": self.step, "weights": self.weights}
        return SuiteResult(suite, rows, **about, **more)


@runtime_checkable
class Suite(Protocol):
    """A kind of evaluation, of ours or of a user's.

    One that takes `--option NAME=VALUE` has an attribute `options`, the meaning of each by its
    name, for the help and the check of the command line.
    """

    def check(self, request: Request) -> None:
        """Raises DataError or ConfigError if it cannot run, before a model is loaded. No torch."""

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Judges a model; collective over the ranks of its layout, equal on all of them."""


def request_in_training(settings: EvaluationConfig, suite: SuiteConfig) -> Request:
    """Returns the request for a suite of a training run."""
    return Request(
        tasks=None if suite.tasks is None else Path(suite.tasks),
        limit=suite.limit,
        seed=suite.seed,
        execute_code=settings.execute_code,
        sandbox=settings.sandbox,
        options=dict(suite.options),
    )


def conditions(judged: Judged, request: Request, *, layout: str, precision: str) -> dict[str, Any]:
    """Returns what the scores of any suite depend on beside the model, for their settings."""
    return {
        "layout": layout,
        "precision": precision,
        "batch_size": judged.batch_size,
        "max_length": judged.max_length,
        "tokenizer": judged.tokenizer_digest,
        "seed": request.seed,
        "limit": request.limit,
        "data": None if judged.data is None else str(judged.data),
        "tasks": None if request.tasks is None else str(request.tasks),
    }


def named_result(name: SuiteName, result: SuiteResult) -> SuiteResult:
    """Returns the result of a user's suite under its name, with the digest of its code; one of ours
    as it is."""
    if not is_plugin(name):
        return result
    code = {"suite": name, "code": plugin_digest(name)}
    return replace(result, suite=label_of(name), settings=code | result.settings)


def suite_of(name: SuiteName, *, where: str = "--suite") -> Suite:
    """Makes a suite by its name. Raises ConfigError if it is a user's and cannot be imported.

    Args:
        where: place of the name, for messages.
    """
    if is_plugin(name):
        return make_plugin(PluginConfig(use=name), Suite, where=where, keys=("", "options"))
    module, attribute = SUITES[name]
    return cast(Suite, getattr(import_module(module), attribute)())

"""Suite `code`: programs that a model writes, run against tests in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from cdrmix.config.evaluation import SuiteName
from cdrmix.errors import ConfigError
from cdrmix.evaluation.code_tasks.extraction import STYLES, Style, asked, stops_of
from cdrmix.evaluation.code_tasks.files import TaskSet, read_sets
from cdrmix.evaluation.code_tasks.judging import (
    JudgedSample,
    Sample,
    checked_tasks,
    counted,
    judge,
    rows_of,
)
from cdrmix.evaluation.code_tasks.task import CodeTask, limits_of
from cdrmix.evaluation.sandbox.host import require_level, self_test
from cdrmix.evaluation.sandbox.program import LevelName
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.log import get_logger
from cdrmix.monitoring.suite_results import SuiteResult

if TYPE_CHECKING:
    from cdrmix.evaluation.scoring import Scorer

logger = get_logger(__name__)

NAME: SuiteName = "code"
_FIRST_TEMPERATURE, _OTHER_TEMPERATURE = 0.2, 0.8  # for k = 1, and above
# By task, samples in their order; by temperature.
_Drawn = dict[str, list[Sample]]


@dataclass(frozen=True)
class Options:
    """Choices of the suite.

    Attributes:
        samples: of each task and temperature (count), no fewer than the largest k.
        k: of pass@k, ascending.
        temperature: of all samples; None: 0.2 for k = 1 and 0.8 above.
        top_p: share of probability that tokens are drawn from.
        max_new_tokens: of a sample; at most half of an input's, so that prompts have the rest.
    """

    samples: int = 20
    k: tuple[int, ...] = (1, 5, 10)
    temperature: float | None = None
    top_p: float = 0.95
    max_new_tokens: int = 512
    style: Style = "completion"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Reads the options of a request. Raises ConfigError if one is wrong."""
        defaults = cls()
        options = cls(
            samples=_whole(given, "samples", defaults.samples),
            k=_ascending(given.get("k")) or defaults.k,
            temperature=_number(given, "temperature", None, least=0.0),
            top_p=_number(given, "top_p", defaults.top_p, least=0.0, most=1.0) or 1.0,
            max_new_tokens=_whole(given, "max_new_tokens", defaults.max_new_tokens),
            style=given.get("style", defaults.style),
        )
        if options.style not in STYLES:
            raise ConfigError(f"style={options.style}: give one of {', '.join(STYLES)}")
        if options.samples < options.k[-1]:
            raise ConfigError(
                f"pass@{options.k[-1]} needs {options.k[-1]} samples of a task or more, and there "
                f"are to be {options.samples}. Give --option samples={options.k[-1]}, or a smaller "
                f"k, such as --option k={options.samples}"
            )
        return options

    @property
    def temperatures(self) -> dict[int, float]:
        """Temperature of the samples for pass@k, by k."""
        if self.temperature is not None:
            return dict.fromkeys(self.k, self.temperature)
        return {k: _FIRST_TEMPERATURE if k == 1 else _OTHER_TEMPERATURE for k in self.k}


class Code:
    """The suite; see `Suite`."""

    options = {
        "samples": "samples of each task (20)",
        "k": "of pass@k, such as 1,10 (1,5,10)",
        "temperature": "of all samples (0.2 for pass@1, 0.8 for others)",
        "top_p": "share of probability that tokens are drawn from (0.95)",
        "max_new_tokens": "of a sample (512, at most half of an input)",
        "style": "completion of the prompt, or fenced in Markdown (completion)",
    }

    def check(self, request: Request) -> None:
        """Raises ConfigError, DataError or PlanError if programs may not run, an option or a file
        of tasks is wrong, or the machine has no such sandbox."""
        if not request.execute_code:
            raise ConfigError(
                "the suite code runs programs that the model writes, in a sandbox, and only where "
                "that is asked for. Give --execute-code, or in a run's configuration "
                "evaluation.execute_code: true"
            )
        Options.of(request.options)
        require_level(_level(request))
        read_sets(request.tasks, limit=request.limit)

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Has a model write programs and judges them; collective. The first rank runs them.

        Raises:
            DataError: if a task's own solution fails its tests, before the model is asked.
            PlanError: if the sandbox does not hold.
        """
        from cdrmix import runtime
        from cdrmix.evaluation.scoring import Scorer

        options = Options.of(request.options)
        level = _level(request)

        def prepare() -> tuple[str, list[TaskSet]]:
            sandbox = self_test(level).description
            sets = read_sets(request.tasks, limit=request.limit)
            checked = [TaskSet(s.name, checked_tasks(s.tasks, level=level), s.digest) for s in sets]
            return sandbox, checked

        sandbox, sets = runtime.first_rank_does(prepare)
        scorer = Scorer.of(judged)
        cut = _count_cut(scorer, sets, options)
        rows = []
        verdicts: dict[str, dict[str, int]] = {}
        passed: dict[str, dict[str, int]] = {}
        for tasks in sets:
            found: dict[float, dict[str, list[JudgedSample]]] = {}
            for temperature in sorted(set(options.temperatures.values())):
                drawn = _draw(scorer, tasks.tasks, options, temperature, request.seed)

                def run(
                    own: Sequence[CodeTask] = tasks.tasks, samples: _Drawn = drawn
                ) -> dict[str, list[JudgedSample]]:
                    return judge(own, samples, style=options.style, level=level)

                found[temperature] = runtime.first_rank_does(run)
            rows += rows_of(tasks, found, options.temperatures, seed=request.seed)
            verdicts[tasks.name] = counted(found)
            for temperature, of_tasks in found.items():
                for name, samples in of_tasks.items():
                    count = sum(sample.verdict.passed for sample in samples)
                    passed.setdefault(name, {})[f"temperature {temperature}"] = count
        return judged.result(
            NAME,
            rows,
            settings=_settings(sets, options, request, scorer, sandbox),
            details={"verdicts": verdicts, "passed": passed, "cut_prompts": cut},
        )


def _draw(
    scorer: Scorer, tasks: Sequence[CodeTask], options: Options, temperature: float, seed: int
) -> _Drawn:
    """Has a model write the samples of tasks; collective.

    Sample j of a task has draws of its own, by the seed, the task's name and j.
    """
    from cdrmix.evaluation.scoring import Prompt, Sampling

    drawn: _Drawn = {}
    room = _new_tokens(options, scorer)
    # Tasks whose answers end at the same texts are asked together.
    for stops in dict.fromkeys(stops_of(task, options.style) for task in tasks):
        alike = [task for task in tasks if stops_of(task, options.style) == stops]
        prompts = [
            Prompt(tokens, task.name, number)
            for task in alike
            for tokens in (_prompt_tokens(task, options, scorer),)
            for number in range(options.samples)
        ]
        sampling = Sampling(
            max_new_tokens=room,
            until=stops,
            temperature=temperature,
            top_p=options.top_p,
            seed=seed,
        )
        for prompt, new in zip(prompts, scorer.continue_prompts(prompts, sampling), strict=True):
            drawn.setdefault(prompt.key, []).append(Sample(new.text, not new.is_ended))
    return drawn


def _count_cut(scorer: Scorer, sets: Sequence[TaskSet], options: Options) -> int:
    """Counts prompts that lose their beginning, and warns of them."""
    whole = [task for each in sets for task in each.tasks]
    room = scorer.max_length - _new_tokens(options, scorer)
    cut = sum(len(_prompt_tokens(task, options, scorer)) > room for task in whole)
    if cut:
        logger.warning(
            "code: %d of %d prompts lose their beginning: an input has %d tokens, %d of them for "
            "the answer. Give fewer max_new_tokens, or a model of longer sequences",
            *(cut, len(whole), scorer.max_length, scorer.max_length - room),
        )
    return cut


def _prompt_tokens(task: CodeTask, options: Options, scorer: Scorer) -> list[int]:
    tokenizer = scorer.tokenizer
    return [*tokenizer.prefix_ids, *tokenizer.encode(asked(task, options.style))]


def _new_tokens(options: Options, scorer: Scorer) -> int:
    """Most tokens of a sample."""
    return min(options.max_new_tokens, max(1, scorer.max_length // 2))


def _settings(
    sets: Sequence[TaskSet], options: Options, request: Request, scorer: Scorer, sandbox: str
) -> dict[str, Any]:
    """All that the scores depend on beside the model."""
    temperatures = {f"pass@{k}": value for k, value in options.temperatures.items()}
    return {
        "samples": options.samples,
        "temperatures": temperatures,
        "top_p": options.top_p,
        "max_new_tokens": _new_tokens(options, scorer),
        "max_length": scorer.max_length,
        "style": options.style,
        "seed": request.seed,
        "limit": request.limit,
        "prefix_ids": list(scorer.tokenizer.prefix_ids),
        "sandbox": sandbox,
        "limits": {each.name: asdict(limits_of(each.tasks)) for each in sets},
        "tasks": {each.name: len(each.tasks) for each in sets},
        "task_digests": {each.name: each.digest for each in sets},
        # compared outside of the program's process
        "two_process": {each.name: sum(bool(t.cases) for t in each.tasks) for each in sets},
    }


def _level(request: Request) -> LevelName:
    return cast(LevelName, request.sandbox)


def _whole(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}={value}: give a whole number of 1 or more")
    return value


def _number(
    given: Mapping[str, Any],
    name: str,
    default: float | None,
    *,
    least: float,
    most: float = float("inf"),
) -> float | None:
    value = given.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        between = f"of {least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"
        raise ConfigError(f"{name}={value}: give a number {between}")
    return float(value)


def _ascending(given: Any) -> tuple[int, ...]:
    """Values of k, such as "1,10"; () if none are given."""
    if given is None:
        return ()
    words = given if isinstance(given, list | tuple) else str(given).split(",")
    try:
        values = tuple(sorted({int(word) for word in words}))
    except ValueError:
        values = ()
    if not values or values[0] < 1:
        raise ConfigError(f"k={given}: give whole numbers of 1 or more, such as k=1,10")
    return values

"""Suite `routing`: use of the experts of each layer on held-out text, against bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cdrmix import runtime
from cdrmix.data.shards import manifest_digest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.monitoring.suite_results import Row, SuiteResult

if TYPE_CHECKING:
    from torch import Tensor

    from cdrmix.config.model import ModelConfig
    from cdrmix.evaluation.perplexity import Apart, LayerRouting

# Bounds of the specification, for 8 experts: of log2(8) = 3 bits more than 2.5. Those for another
# number of experts are the same share of its largest entropy.
OVERFLOW_BOUND = 0.05
ENTROPY_BOUND_BITS = 2.5
_BOUND_EXPERTS = 8
_NUM_RESAMPLES = 1_000
_INTERVAL = (2.5, 97.5)  # percentiles
_METRICS = ("utilisation_min", "utilisation_max", "utilisation_cv", "overflow", "entropy_bits")
# A mixer has no capacity that its tokens could exceed.
_BOUNDED = {"layer": ("overflow", "entropy_bits"), "mixer": ("entropy_bits",)}


@dataclass(frozen=True)
class Check:
    """One score against its bound."""

    task: str
    metric: str
    score: float
    bound: float
    passed: bool

    def line(self) -> str:
        """Says for a person if the bound is kept."""
        sign = "<" if self.metric == "overflow" else ">"
        said = "within" if self.passed else "OUTSIDE OF"
        return (
            f"{self.task}: {self.metric} {self.score:.4f}, {said} the bound {sign} {self.bound:.4g}"
        )


def check_of(task: str, metric: str, score: float, num_experts: int) -> Check:
    """Compares a score of a router with the bound of its metric, `overflow` or `entropy_bits`."""
    if metric == "overflow":
        return Check(task, metric, score, OVERFLOW_BOUND, score < OVERFLOW_BOUND)
    share = ENTROPY_BOUND_BITS / math.log2(_BOUND_EXPERTS)
    bound = share * math.log2(num_experts)
    return Check(task, metric, score, bound, score > bound)


class Routing:
    """Use of experts in each MoE layer (`layer N`) and Routing Mamba mixer (`mixer N`): smallest
    and largest share of the assignments, their coefficient of variation, the share beyond the
    capacity factor, and the entropy of the shares in bits. Intervals are over batches.

    `limit` samples of the training's length are read; by default as many as have as many tokens as
    the option `max_tokens` says, or `evaluation.final_tokens`.
    """

    def check(self, request: Request) -> None:
        """Raises ConfigError for tasks from files."""
        if request.tasks is not None:
            raise ConfigError(
                "routing: is measured on held-out text and reads no tasks. Leave --tasks out, or "
                "give --data DIR"
            )

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Measures the routers. Raises ConfigError if the model has none."""
        from cdrmix.evaluation.perplexity import evaluate_apart

        if judged.model.num_routers == 0:
            raise ConfigError(
                f"{judged.source}: has no experts, so that nothing is routed. Choose another "
                "--suite for a dense model"
            )
        folder = judged.data
        if folder is None:
            raise DataError(judged.no_data)
        length = judged.config.training.sequence_length
        dataset = runtime.together(lambda: TokenDataset(folder, "validation", length))
        manifest = dataset.manifest
        if judged.tokenizer_digest not in (None, manifest.tokenizer.sha256):
            raise DataError(
                f"{folder}: is in tokens of another tokenizer than the model's. Give --data DIR, a "
                "data set of its tokenizer"
            )
        max_tokens = int(request.options.get("max_tokens") or judged.config.evaluation.final_tokens)
        if request.limit is not None:
            max_tokens = min(max_tokens, request.limit * length)
        apart = evaluate_apart(
            judged.model,
            dataset,
            max_tokens=max_tokens,
            batch_size=judged.batch_size,
            segment_documents=judged.config.data.segment_documents,
            topology=judged.topology,
        )
        routers = _named(apart.whole.layers, apart.whole.mixers)
        rows = list(_rows(judged.model.config, apart, routers, request.seed))
        experts = {name: len(each.utilisation) for name, each in routers.items()}
        checks = [
            check_of(row.task, row.metric, row.score, experts[row.task])
            for row in rows
            if row.metric in _BOUNDED[row.task.partition(" ")[0]]
        ]
        return judged.result(
            "routing",
            rows,
            settings={
                "seed": request.seed,
                "tokens": apart.whole.tokens,
                "samples": len(apart.tokens),
                "sequence_length": length,
                "segment_documents": judged.config.data.segment_documents,
                "data_digest": manifest_digest(manifest),
            },
            details=_details(apart, checks),
            notes=[each.line() for each in checks],
        )


def _details(apart: Apart, checks: list[Check]) -> dict[str, Any]:
    whole = apart.whole
    return {
        "layers": [asdict(each) for each in whole.layers],
        "mixers": [asdict(each) for each in whole.mixers],
        "checks": [asdict(each) for each in checks],
        "passed": all(each.passed for each in checks),
    }


def _named(layers: list[LayerRouting], mixers: list[LayerRouting]) -> dict[str, LayerRouting]:
    """Routers by the names of their rows."""
    named = (("layer", layers), ("mixer", mixers))
    return {f"{kind} {each.layer}": each for kind, found in named for each in found}


def _rows(
    config: ModelConfig, apart: Apart, routers: dict[str, LayerRouting], seed: int
) -> Iterator[Row]:
    """Rows of all routers, with intervals by drawing as many batches again, with replacement."""
    count = len(apart.read)
    resampled: dict[str, list[tuple[float, ...]]] = {}
    draw = np.random.default_rng(seed)
    for _ in range(_NUM_RESAMPLES if count > 1 else 0):
        times = draw.multinomial(count, [1 / count] * count)
        for name, scores in _resampled(config, apart, times).items():
            resampled.setdefault(name, []).append(scores)
    for name, routing in routers.items():
        bounds = np.full((2, len(_METRICS)), None)
        if name in resampled:
            bounds = np.percentile(resampled[name], _INTERVAL, axis=0)
        for place, (metric, score) in enumerate(zip(_METRICS, _scores(routing), strict=True)):
            low, high = bounds[:, place].tolist()
            yield Row(name, metric, score, low, high, count)


def _resampled(
    config: ModelConfig, apart: Apart, times: np.ndarray
) -> dict[str, tuple[float, ...]]:
    """Scores of each router over batches that are each counted so many times."""
    from cdrmix.evaluation.perplexity import routing_of

    weights = apart.read.new_tensor(times)
    sums: Tensor = weights @ apart.routing
    found = routing_of(config, sums, num_tokens=weights @ apart.read)
    named = _named(found["ffn"], found["mixer"])
    return {name: _scores(routing) for name, routing in named.items()}


def _scores(routing: LayerRouting) -> tuple[float, ...]:
    """Values of `_METRICS`."""
    shares = np.array(routing.utilisation)
    variation = float(shares.std() / shares.mean())
    return (
        *(float(shares.min()), float(shares.max()), variation),
        *(routing.overflow_fraction, routing.routing_entropy_bits),
    )

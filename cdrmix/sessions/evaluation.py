"""Evaluation of a trained model by a suite: in one process, or laid out over ranks. No torch until
the suite has been asked if it can run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cdrmix import runtime
from cdrmix.config.evaluation import SuiteName
from cdrmix.data.shards import read_manifest
from cdrmix.errors import StateError
from cdrmix.evaluation.model_folder import kind_of
from cdrmix.evaluation.suite import (
    Judged,
    Request,
    Suite,
    conditions,
    named_result,
    suite_of,
)
from cdrmix.export.manifest import MANIFEST_FILE, verify_export
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.monitoring.suite_results import SuiteResult, store_result

if TYPE_CHECKING:
    from torch import nn

    from cdrmix.config.schema import Config
    from cdrmix.evaluation.judged import FoundModel, Wanted
    from cdrmix.models.backbone import LanguageModel
    from cdrmix.parallel.topology import Topology
    from cdrmix.planning.plan import Plan

logger = get_logger(__name__)


@dataclass(frozen=True)
class Asked:
    """Evaluation that a user asks for.

    Attributes:
        suite: its name.
        request: what the suite is asked for.
        source, checkpoint, weights, base, batch_size, max_length: as of `Wanted`.
        overrides: --set of the layout.
        profile: DeepSpeed profile, name or path; None: chosen.
        out: file for the result, beside the run directory; None: none.
    """

    suite: SuiteName
    request: Request
    source: Path
    checkpoint: str | None = None
    weights: Literal["trained", "ema"] | None = None
    base: Path | None = None
    batch_size: int = 8
    max_length: int | None = None
    overrides: Sequence[str] = ()
    profile: str | None = None
    out: Path | None = None


@dataclass(frozen=True)
class Measured:
    """Result of an evaluation, and the run directory that it belongs to; None outside of one."""

    result: SuiteResult
    run_dir: Path | None


def checked_suite(asked: Asked) -> Suite:
    """Makes the suite, and asks if it can run on what there is. No torch.

    Raises:
        ConfigError, DataError: if it cannot, or there is no data set where one is given.
        StateError: if there is no model to judge, or no folder for the result.
    """
    suite = suite_of(asked.suite)
    suite.check(asked.request)
    if asked.out is not None and not asked.out.parent.is_dir():
        raise StateError(f"--out {asked.out}: there is no folder {asked.out.parent}. Make it first")
    kind_of(asked.source)
    data = asked.request.data
    if data is not None and "://" not in data:
        read_manifest(Path(data), given_as="--data")
    return suite


def evaluate_whole(asked: Asked) -> Measured:
    """Evaluates a model in this process, float32.

    Raises:
        TrainingError: with one message, if suite, model or data cannot be used.
    """
    suite = checked_suite(asked)
    from cdrmix.evaluation.judged import find_model, judged, load_whole

    _verify(asked.source)
    wanted = _wanted(asked)
    found = find_model(wanted)
    model = judged(found, load_whole(found), wanted, asked.request)
    return _measured(suite, asked, found, model, layout="one process", precision="fp32")


def evaluate_in_layout(asked: Asked, suite: Suite) -> Measured:
    """Evaluates a model on all ranks, whose process group is there; collective.

    The layout is that of --set parallel.*, and else the one that cuts the model least.

    Args:
        suite: of `checked_suite`, which each rank asks before they meet.
    Returns:
        The same result on every rank.
    Raises:
        TrainingError: with one message, on every rank, if model, data or layout cannot be used.
    """
    from cdrmix.evaluation.judged import find_model, judged
    from cdrmix.parallel.apply import build_model, join_experts
    from cdrmix.parallel.topology import make_topology

    _verify(asked.source)
    wanted = _wanted(asked)
    found = find_model(wanted)
    config = runtime.together(lambda: _config_of_layout(found, asked))
    plan = _plan(config, asked.profile)
    topology = make_topology(plan.degrees)
    module = build_model(config, plan, topology)
    precision = config.training.precision
    if plan.zero_stage < 3 and precision != "fp32":  # ZeRO-3 has cast what it partitions
        module.to(_types()[precision])
    _fill(module, found, topology)
    join_experts(module, topology)
    with _callable(module, plan) as model:
        put_together = judged(found, model, wanted, asked.request, topology=topology)
        layout = f"{plan.degrees.describe()}, {plan.name}"
        return _measured(suite, asked, found, put_together, layout=layout, precision=precision)


def _wanted(asked: Asked) -> Wanted:
    from cdrmix.evaluation.judged import Wanted

    return Wanted(
        source=asked.source,
        checkpoint=asked.checkpoint,
        weights=asked.weights,
        base=asked.base,
        batch_size=asked.batch_size,
        max_length=asked.max_length,
    )


def _verify(source: Path) -> None:
    """Compares the files of an export with its manifest, each on one rank; collective."""
    if (source / MANIFEST_FILE).is_file():
        rank, ranks = runtime.rank(), runtime.world_size()
        runtime.together(lambda: verify_export(source, part=rank, parts=ranks))


def _config_of_layout(found: FoundModel, asked: Asked) -> Config:
    from cdrmix.planning.evaluation_plan import config_of_judged

    return config_of_judged(
        found.config.name,
        found.config.model.model_dump(),
        sequence_length=asked.max_length or found.config.training.sequence_length,
        overrides=asked.overrides,
        samples=asked.batch_size,
        place=str(found.path),
    )


def _plan(config: Config, profile: str | None) -> Plan:
    """Chooses the layout on these ranks, and logs it with its reasons; collective."""
    from cdrmix.planning.evaluation_plan import choose_for_evaluation
    from cdrmix.sessions.ranks_here import cluster_here

    cluster = cluster_here()
    plan = runtime.first_rank_does(lambda: choose_for_evaluation(config, cluster, profile=profile))
    for reason in plan.reasons:
        logger.info("plan: %s", reason)
    return plan


def _types() -> dict[str, Any]:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}


def _fill(module: nn.Module, found: FoundModel, topology: Topology) -> None:
    """Reads the weights of a model into this rank's part of it; collective."""
    from cdrmix.checkpoint.module_part import fill_part
    from cdrmix.evaluation.judged import open_weights
    from cdrmix.parallel.apply import logical_name_in

    name = logical_name_in(found.config.model)
    with contextlib.ExitStack() as stack:
        parts = runtime.together(lambda: stack.enter_context(open_weights(found)))
        for part in parts:
            fill_part(module, part.weights, topology, name, absent=part.absent)


@contextlib.contextmanager
def _callable(module: nn.Module, plan: Plan) -> Iterator[LanguageModel]:
    """Makes a filled model one that suites call, as long as the context lasts; collective."""
    from cdrmix.hf.family_check import check_family
    from cdrmix.hf.model import HuggingFaceModel
    from cdrmix.parallel.apply import for_inference

    engine = None
    if plan.zero_stage == 3:
        # Without an optimizer, an engine of DeepSpeed only gathers weights around the modules.
        deepspeed = runtime.import_deepspeed()
        with contextlib.redirect_stdout(io.StringIO()):  # it describes itself at length
            engine, *_ = deepspeed.initialize(
                model=module, config=plan.deepspeed, dist_init_required=False
            )
        runtime.share_timeout()
        module = engine.module
    model = for_inference(module)
    if isinstance(model, HuggingFaceModel):
        check_family(model, trains=False)
    model.eval()
    try:
        yield model
    finally:
        if engine is not None:
            engine.destroy()


def _measured(
    suite: Suite, asked: Asked, found: FoundModel, model: Judged, *, layout: str, precision: str
) -> Measured:
    """Runs the suite, and notes what the scores depend on beside what the suite notes itself."""
    result = named_result(asked.suite, suite.measure(model, asked.request))
    noted = conditions(model, asked.request, layout=layout, precision=precision)
    return Measured(replace(result, settings=noted | result.settings), found.run_dir)


def keep(measured: Measured, out: Path | None) -> None:
    """Writes a result into its run directory, if it has one, and to `out`; one rank calls it.

    A run directory that cannot be written is warned of. Raises StateError if `out` cannot be.
    """
    result, run_dir = measured.result, measured.run_dir
    if out is not None:
        write_json_atomic(out, result.as_json())
    if run_dir is None:
        return
    try:
        logger.info("stored: %s", store_result(run_dir, result))
    except (OSError, StateError) as error:
        logger.warning("warning: the result is not stored in its run directory: %s", error)

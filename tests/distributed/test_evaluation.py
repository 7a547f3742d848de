"""Held-out loss and routing on several ranks against one, and against their definition."""

import contextlib
import json
import os
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.load import load_config
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.evaluation.documents import Reading, carried_nats, reset_nats
from cdrmix.evaluation.held_out import held_out_documents
from cdrmix.evaluation.perplexity import evaluate, evaluate_apart, held_out_rows
from cdrmix.models.backbone import Backbone, LanguageModel, logical_name
from cdrmix.models.initialize import normal_
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.parallel.tensor import shard_of
from cdrmix.parallel.topology import Topology
from cdrmix.planning.cluster import processes
from cdrmix.planning.profile import choose
from tests.harness import run_ranks
from tests.small_run import CONFIG, SMALL, arguments, start

# Five batches of two: on two ranks one pass is not counted. The eighth sample alone is of prose.
ROWS, LENGTH = 9, 64


AWAKE = ("training.max_steps=1", "model.init_std_scale=5")  # losses that differ
# Documents of one to four windows, more than two ranks have batches of two for.
SIZES = (20, 200, 64, 130, 65, 7, 90)


def evaluated(
    data: str, settings: tuple[str, ...] = (), profile: str | None = None
) -> tuple[dict[str, Any], float, list[list[float]]]:
    """What each rank finds, the loss by its definition where there is one rank, and the nats of
    documents, reset and carried."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.parallel.apply import build_model, for_inference
    from cdrmix.parallel.topology import make_topology

    runtime.initialize_distributed()
    config = load_config(CONFIG, [*SMALL, *AWAKE, *settings, f"data.path={data}"])
    plan = choose(config, processes(runtime.world_size()), profile=profile)
    topology = make_topology(plan.degrees)
    model = build_model(config, plan, topology)
    expert = plan.degrees.expert
    rank_in_stage = topology.rank % (topology.degrees.data * topology.degrees.tensor)
    _wake_experts(model, first=rank_in_stage % expert * (8 // expert))
    _wake_mixers(model)
    engine = start_engine(model, config, plan, topology)
    module, dataset = for_inference(engine.module), TokenDataset(Path(data), "validation", LENGTH)
    found = evaluate(module, dataset, max_tokens=ROWS * LENGTH, batch_size=2, topology=topology)
    assert module.training, "evaluation leaves the mode as it was"
    plain = _plain_loss(engine.module, dataset) if runtime.world_size() == 1 else found.loss
    apart = evaluate_apart(
        module, dataset, max_tokens=ROWS * LENGTH, batch_size=2, topology=topology
    )
    documents = _nats_of_documents(module, dataset, topology)
    documents.append(apart.nats.tolist())
    assert apart.whole.tokens == found.tokens == apart.tokens.sum()
    assert float(apart.read.sum()) == found.tokens
    runtime.destroy_distributed()
    return found.as_json(), plain, documents


def _nats_of_documents(
    model: LanguageModel, dataset: TokenDataset, topology: Topology
) -> list[list[float]]:
    longest = [
        each.tokens for each in held_out_documents(dataset.folder) if len(each.tokens) >= max(SIZES)
    ]
    documents = [
        np.concatenate([[dataset.manifest.eos_id], tokens[:size]])
        for tokens, size in zip(cycle(longest), SIZES, strict=False)
    ]
    reading = Reading(documents, 0, LENGTH, 2, topology)
    reset = reset_nats(model, reading, stride=LENGTH // 2)
    return [reset.tolist(), carried_nats(model, reading).tolist()]


@torch.no_grad()
def _wake_experts(model: nn.Module, *, first: int) -> None:
    """Numbers for the down projections, which start at zero, by each expert's global number."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down"):
            for i, down in enumerate(parameter):
                normal_(down, 0.1, seed=1, name=f"{logical_name(name)}.{first + i}")


@torch.no_grad()
def _wake_mixers(model: nn.Module) -> None:
    """Numbers for the output projections, which start at zero: tokens would not see each other."""
    for name, parameter in model.named_parameters():
        if not name.endswith("mixer.output.weight"):
            continue
        shard = shard_of(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        shape = shape if shard is None else shard.logical_shape
        whole = torch.empty(shape)
        normal_(whole, 0.3, seed=1, name=logical_name(name))
        if shard is not None:
            for dim, (begin, size) in enumerate(zip(shard.offset, parameter.shape, strict=True)):
                whole = whole.narrow(dim, begin, size)
        gathered = contextlib.nullcontext()
        if hasattr(parameter, "ds_id"):
            zero = runtime.import_deepspeed().zero
            gathered = zero.GatheredParameters([parameter], modifier_rank=0)
        with gathered:
            parameter.copy_(whole)


@torch.no_grad()
def _plain_loss(model: Backbone, dataset: TokenDataset) -> float:
    rows = torch.from_numpy(dataset.rows(held_out_rows(dataset, ROWS * LENGTH)))
    logits = model.logits(model.eval()(rows[:, :-1]).hidden)
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def flat(evaluation: dict[str, Any], *, overflow: bool) -> np.ndarray:
    layers = [
        [
            *layer["utilisation"],
            overflow * layer["overflow_fraction"],
            layer["routing_entropy_bits"],
        ]
        for layer in evaluation["layers"]
    ]
    whole = [evaluation["loss"], evaluation["bits_per_byte"]]
    domains = [each[name] for each in evaluation["domains"] for name in ("loss", "tokens")]
    return np.array([*whole, *domains, *sum(layers, [])])


AXES = ("expert", "pipeline", "sequence", "tensor")
EXPERT, PIPELINE, SEQUENCE, TENSOR = (f"parallel.{axis}=2" for axis in AXES)
DENSE = "model.moe=null"
ROUTED_IN_DEPTH = "model.mod={}"


@pytest.mark.parametrize(
    ("world", "settings", "profile"),
    [
        (2, (), None),
        (2, (EXPERT,), None),
        (4, (EXPERT,), None),
        (2, (TENSOR,), None),
        (4, (TENSOR, "parallel.expert=4"), None),
        (2, (SEQUENCE,), None),
        (2, (PIPELINE,), None),
        (4, (PIPELINE, EXPERT), None),
        (4, (PIPELINE, TENSOR), None),
        (2, (DENSE,), "gathered late"),
        (2, (EXPERT, ROUTED_IN_DEPTH), None),
    ],
)
def test_evaluation_is_the_same_on_any_number_of_ranks(
    world: int,
    settings: tuple[str, ...],
    profile: str | None,
    small_corpus: Path,
    tmp_path: Path,
) -> None:
    if profile is not None:  # the head is gathered anew in each pass, by all data ranks
        zero = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        path = tmp_path / "late.json"
        path.write_text(json.dumps({"zero_optimization": zero}))
        profile = str(path)
    of_model = tuple(setting for setting in settings if setting.startswith("model."))
    ((one, plain, documents),) = run_ranks(evaluated, 1, str(small_corpus), of_model)
    assert one["loss"] == pytest.approx(plain, rel=1e-5)
    assert one["tokens"] == ROWS * LENGTH
    ranks = run_ranks(evaluated, world, str(small_corpus), settings, profile, timeout=60)
    found = [evaluation for evaluation, *_ in ranks]
    for *_, nats in ranks:
        for ours, theirs in zip(nats, documents, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    reset, carried, _ = documents
    is_single = np.array(SIZES) <= LENGTH
    np.testing.assert_allclose(np.array(reset)[is_single], np.array(carried)[is_single], rtol=1e-6)
    assert (np.abs(np.array(reset) / carried - 1)[~is_single] > 1e-4).all()
    assert all(evaluation == found[0] for evaluation in found), "every rank has the same result"
    assert found[0]["tokens"] == one["tokens"]
    for result in (found[0], one):
        domains = result["domains"]
        assert [each["domain"] for each in domains] == ["code", "prose"]
        nats = sum(each["loss"] * each["tokens"] for each in domains)
        assert nats / result["tokens"] == pytest.approx(result["loss"], rel=1e-13)
    # the capacity is that of the tokens that a rank routes, which tensor ranks share
    ours, theirs = (flat(result, overflow=TENSOR not in settings) for result in (found[0], one))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_run_tells_loss_and_samples_by_domain(small_corpus: Path, run_dir: Path) -> None:
    phases = '[{"weights": {"code": 1, "prose": 0}, "samples": 24}, {"weights": {"prose": 1}}]'
    more = ("--set", f"data.mixture.phases={phases}", "--set", "evaluation.every_steps=30")
    assert run_ranks(start, 2, arguments(small_corpus, run_dir, *more), timeout=60) == [0, 0]
    names = {domain: f"data/domain/{domain}/samples" for domain in ("code", "prose")}
    for line in read_metrics(run_dir / "metrics.jsonl"):
        drawn = {domain: line[name] for domain, name in names.items() if name in line}
        samples = 8 * line["step"]  # of the global batch
        later = {"prose": samples - 24} if samples > 24 else {}
        assert drawn == {"code": min(samples, 24), **later}
    evaluation = json.loads((run_dir / "metrics.json").read_text())["evaluation"]
    domains = {each["domain"]: each["tokens"] for each in evaluation["domains"]}
    assert domains.keys() == names.keys() and sum(domains.values()) == evaluation["tokens"]
    log = (run_dir / "train.log").read_text()
    assert f"validation loss by domain: code {evaluation['domains'][0]['loss']:.4f}, prose " in log


def start_with_an_early_end(argv: list[str], eos_id: int) -> int:
    """A small run in which rank 1 alone finds its sample of text at an end at once."""
    if int(os.environ["RANK"]) == 1:
        Backbone.logits = lambda self, hidden: (
            1e9 * F.one_hot(torch.full(hidden.shape[:-1], eos_id), self.config.vocab_size)
        )
    return start(argv)


def test_ranks_that_draw_different_tokens_finish_a_sample_together(
    small_corpus: Path, run_dir: Path
) -> None:
    more = ("--set", "parallel.expert=2", "--max-steps", "1")
    argv = arguments(small_corpus, run_dir, *more)
    eos_id = load_tokenizer(small_corpus).eos_id
    assert run_ranks(start_with_an_early_end, 2, argv, eos_id, timeout=60) == [0, 0]

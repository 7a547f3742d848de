"""Low-rank adapters of Hugging Face models in the training loop, in each layout against plain torch
and peft; their checkpoints, folders in PEFT's format, and merged weights.

Runs of one world size share their processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.config.schema import Config
from tests.checkpoints import save_checkpoint
from tests.harness import run_ranks
from tests.hf_models import make_folder
from tests.hf_runs import (
    CLIPPING,
    STEPS,
    Case,
    Started,
    _plain_loss,
    global_batch,
    loaded,
    make_config,
    make_plan,
    run_steps,
)

FAMILIES = ("llama", "mixtral", "nemotron_h")
WITH_EXPERTS = ("mixtral", "nemotron_h")
BEFORE = 2  # steps done when a run is saved
CASES = [
    *(Case(family, profile) for family in FAMILIES for profile in ("zero2", "zero3")),
    Case("llama", "zero2_offload"),
    Case("mixtral", "zero3", recompute=True),
    Case("mixtral", "zero3_offload"),
]
# saved by one, loaded by the other: on two ranks, on one
MOVES = {
    2: [
        *((case, case) for case in CASES[:6]),
        *((Case(family, "zero2"), Case(family, "zero3")) for family in FAMILIES),
    ],
    1: [(Case("mixtral", "zero3"), Case("mixtral", "zero2"))],
}
LORA = {"rank": 4, "alpha": 16.0}


class Ending(NamedTuple):
    """How a run went, as one rank sees it. Scores are of the rows of step 0, in numpy."""

    steps: list[tuple[float, float]]  # loss and gradient norm
    masters: dict[str, Any]  # this rank's share of the state at the end, by name, kind and span
    first: Any  # scores before the first step, of an engine that has not been called yet
    saved: Any  # scores where it was saved


def configured(case: Case, folder: str, *, seed: int = 1234) -> Config:
    config = make_config(case, Path(folder))
    values = config.model_dump()
    values["model"]["lora"] = LORA
    values["training"]["seed"] = seed
    return Config.model_validate(values)


def begun(case: Case, folder: str, *, seed: int = 1234) -> tuple[Started, dict[str, Any]]:
    """This rank's engine with the weights of the folder, and the record of the base."""
    from cdrmix.engines.base_model import load_base
    from cdrmix.engines.loop import start_engine
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    config = configured(case, folder, seed=seed)
    plan = make_plan(case, config, runtime.world_size())
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    base = load_base(config, engine)
    return Started(config, plan, topology, engine), base


def held(started: Started) -> Iterator[Any]:
    from cdrmix.parallel.apply import frozen_in, logical_name_in

    model = started.config.model
    name = logical_name_in(model)
    return engine_state.fragments(started.engine, name, elsewhere=frozen_in(model))


def write(started: Started, base: dict[str, Any], folder: Path) -> None:
    state = {
        "engine": engine_state.counters(started.engine),
        "base": base,
        "config": started.config.model_dump(mode="json"),
    }
    fragments = held(started)
    save_checkpoint(folder, BEFORE, fragments, state=state, rank_state={}, keep=1)


def load(started: Started, folder: Path) -> None:
    from cdrmix.parallel.apply import frozen_in, logical_name_in

    model = started.config.model
    with CheckpointFile(folder / str(BEFORE)) as reader:
        name = logical_name_in(model)
        engine_state.load_engine(started.engine, reader, name, elsewhere=frozen_in(model))


def ending(started: Started, steps: list[tuple[float, float]], first: Any, saved: Any) -> Ending:
    masters = {f"{p.kind} {p.name} {p.span}": p.values.numpy().copy() for p in held(started)}
    return Ending(steps, masters, first, saved)


def logits_of(started: Started) -> Any:
    """Scores of the rows of step 0, by the engine's module itself."""
    model = started.engine.module
    ids = global_batch(0, started.config.model.vocab_size)["input_ids"]
    model.eval()
    with torch.no_grad():
        logits = model.logits(model(ids).hidden)
    model.train()
    return logits.float().numpy().copy()


def train(root: str, cases: list[Case]) -> list[Ending]:
    runtime.initialize_distributed()
    found = []
    for case in cases:
        started, base = begun(case, f"{root}/{case.family}")
        first = logits_of(started)
        steps = run_steps(started, count=BEFORE)
        write(started, base, Path(root) / "saved" / str(case))
        saved = logits_of(started)
        steps += run_steps(started, first=BEFORE, count=STEPS - BEFORE)
        found.append(ending(started, steps, first, saved))
    runtime.destroy_distributed()
    return found


def go_on(root: str, moves: list[tuple[Case, Case]]) -> list[Ending]:
    """From each checkpoint, into an engine whose adapters have begun otherwise; saves it anew."""
    runtime.initialize_distributed()
    found = []
    for before, after in moves:
        started, base = begun(after, f"{root}/{after.family}", seed=2)
        first = logits_of(started)
        load(started, Path(root) / "saved" / str(before))
        saved = logits_of(started)
        write(started, base, Path(root) / "again" / f"{before} {after} {runtime.world_size()}")
        steps = run_steps(started, first=BEFORE, count=STEPS - BEFORE)
        found.append(ending(started, steps, first, saved))
    runtime.destroy_distributed()
    return found


def plain(folder: str, config: Config) -> tuple[Any, list[tuple[float, float]]]:
    """Scores before the first step, and losses and norms, by plain torch around peft's model."""
    from cdrmix.hf.lora import add_adapters
    from cdrmix.optimizers.schedule import learning_rate

    assert config.model.lora is not None
    model = add_adapters(loaded(Path(folder)), config.model.lora, seed=config.training.seed)
    training = config.training
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        weight_decay=training.weight_decay,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )
    ids = global_batch(0, config.model.vocab_size)["input_ids"]
    with torch.no_grad():
        first = model(ids, use_cache=False).logits
    steps = []
    for step in range(STEPS):
        batch = global_batch(step, config.model.vocab_size)
        learned, nats, balance = _plain_loss(model, batch, config)
        valid = float((batch["labels"] != -100).sum())
        (learned + balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIPPING)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(nats.detach()) / valid, float(norm)))
    return first, steps


class Runs(NamedTuple):
    """Trained on two ranks: folder of models and checkpoints, and outcomes of rank 0 and 1."""

    root: str
    endings: dict[str, tuple[Ending, Ending]]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with tempfile.TemporaryDirectory() as root:
        for family in FAMILIES:
            make_folder(Path(root) / family, family)
        zero, one = run_ranks(train, 2, root, CASES, timeout=300)
        names = [str(case) for case in CASES]
        yield Runs(root, dict(zip(names, zip(zero, one, strict=True), strict=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layout_trains_as_one_plain_process(family: str, runs: Runs) -> None:
    folder = f"{runs.root}/{family}"
    for case in CASES:
        if case.family != family:
            continue
        first, expected = plain(folder, configured(case, folder))
        assert abs(expected[-1][0] - expected[0][0]) > 1e-3, "control: it learns"
        for found in runs.endings[str(case)]:
            assert (torch.from_numpy(found.first) - first).abs().max() <= 1e-5, f"{case}: the base"
            for (loss, norm), (its_loss, its_norm) in zip(found.steps, expected, strict=True):
                assert abs(loss - its_loss) <= 5e-6, case
                assert abs(norm - its_norm) <= 1e-5 * its_norm, case


def test_a_resumed_run_is_the_uninterrupted_one(runs: Runs) -> None:
    by_rank = run_ranks(go_on, 2, runs.root, MOVES[2], timeout=300)
    for rank, endings in enumerate(by_rank):
        for (before, after), found in zip(MOVES[2], endings, strict=True):
            expected = runs.endings[str(before)][rank]
            if before == after:
                assert found.steps == expected.steps[BEFORE:], before
                assert found.masters.keys() == expected.masters.keys()
                for name, values in found.masters.items():
                    assert (values == expected.masters[name]).all(), f"{before}: {name}"
            # one checkpoint, saved from here again: no layout changes a bit of it
            saved = Path(runs.root) / "saved" / str(before) / str(BEFORE)
            again = Path(runs.root) / "again" / f"{before} {after} 2" / str(BEFORE)
            with CheckpointFile(saved) as one, CheckpointFile(again) as other:
                assert one.names() and sorted(one.names()) == sorted(other.names())
                for name in one.names():
                    assert ".lora_" in name, "the base is not in a checkpoint"
                    assert sorted(one.kinds(name)) == ["exp_avg", "exp_avg_sq", "param", "step"]
                    for kind in one.kinds(name):
                        assert torch.equal(one.full(name, kind), other.full(name, kind)), name


def test_two_ranks_go_on_as_one(runs: Runs) -> None:
    (endings,) = run_ranks(go_on, 1, runs.root, MOVES[1], timeout=300)
    for (before, _), found in zip(MOVES[1], endings, strict=True):
        expected = runs.endings[str(before)][0].steps[BEFORE:]
        for (loss, norm), (its_loss, its_norm) in zip(found.steps, expected, strict=True):
            assert abs(loss - its_loss) <= 1e-5
            assert abs(norm - its_norm) <= 1e-4 * its_norm


def exported(runs: Runs, case: Case, out: Path, *, folder: str | None = None) -> None:
    """Writes the adapters of a case's checkpoint in PEFT's format."""
    from cdrmix.export.peft_adapter import RunAdapters, write_adapter

    out.mkdir()
    config = configured(case, folder or f"{runs.root}/{case.family}")
    with CheckpointFile(Path(runs.root) / "saved" / str(case) / str(BEFORE)) as reader:
        write_adapter(out, RunAdapters(reader, config))


def scores(model: Any) -> torch.Tensor:
    ids = global_batch(0, model.config.vocab_size)["input_ids"]
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_gives_peft_the_model_of_the_run(
    family: str, runs: Runs, tmp_path: Path
) -> None:
    from peft import PeftModel

    case = Case(family, "zero2")
    exported(runs, case, tmp_path / "adapter")
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    base = loaded(Path(runs.root) / family)
    of_base = scores(base)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    found, expected = scores(model), torch.from_numpy(runs.endings[str(case)][0].saved)
    assert (found - expected).abs().max() == 0
    assert (found - of_base).abs().max() > 1e-3, "control: adapters act"
    # the same checkpoint gives the same bytes
    exported(runs, case, tmp_path / "again")
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (
            tmp_path / "adapter" / name
        ).read_bytes()


def merged_scores(folder: Path, adapters: Any) -> torch.Tensor:
    """Scores of the base with the adapters in its weights."""
    from cdrmix.checkpoint.base_model import BaseWeights
    from cdrmix.export.peft_adapter import MergedWeights

    model = loaded(folder)
    with BaseWeights(folder) as base:
        weights = MergedWeights(base, adapters)
        for name, values in model.state_dict().items():
            merged = weights.read(name, Span.whole(Box.whole(values.shape)))
            values.copy_(merged.view(values.shape))
    return scores(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_the_model_of_the_run(
    family: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdrmix.export.peft_adapter import RunAdapters

    case = Case(family, "zero3")
    folder = Path(runs.root) / family
    expected = torch.from_numpy(runs.endings[str(case)][0].saved)
    with CheckpointFile(Path(runs.root) / "saved" / str(case) / str(BEFORE)) as reader:
        adapters = RunAdapters(reader, configured(case, str(folder)))
        assert (merged_scores(folder, adapters) - expected).abs().max() <= 1e-5
        if family in WITH_EXPERTS:
            # B with the expert slowest, as A has it: every expert gets columns of others
            read = adapters.factor
            stacked = {each.b for each in adapters.by_weight.values() if each.num_experts}

            def misread(name: str) -> torch.Tensor:
                values = read(name)
                if name not in stacked:
                    return values
                by_expert = values.view(len(values), 4, -1)  # [out, E, r], of four experts
                return by_expert.transpose(1, 2).reshape(values.shape)

            monkeypatch.setattr(adapters, "factor", misread)
            assert (merged_scores(folder, adapters) - expected).abs().max() > 1e-3, "control"


def test_merged_weights_are_the_same_read_whole_or_in_pieces(runs: Runs) -> None:
    from cdrmix.checkpoint.base_model import BaseWeights
    from cdrmix.export.peft_adapter import MergedWeights, RunAdapters

    case = Case("mixtral", "zero3")
    folder = Path(runs.root) / "mixtral"
    with (
        CheckpointFile(Path(runs.root) / "saved" / str(case) / str(BEFORE)) as reader,
        BaseWeights(folder) as base,
    ):
        adapters = RunAdapters(reader, configured(case, str(folder)))
        weights = MergedWeights(base, adapters)
        for name in adapters.by_weight:
            block = Box.whole(weights.shape(name))
            whole = weights.read(name, Span.whole(block))
            middle = Span(block, block.numel // 3, block.numel // 2)
            part = whole[middle.start : middle.start + middle.numel]
            assert torch.allclose(weights.read(name, middle), part, atol=1e-7), name
            *ends, width = block.shape
            row = Box((*(size - 1 for size in ends), 0), (*(1 for _ in ends), width))
            read = weights.read(name, Span.whole(row))
            assert torch.allclose(read, whole[-width:], atol=1e-7), name

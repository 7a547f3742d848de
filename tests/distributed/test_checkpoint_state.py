"""A DeepSpeed engine's state, saved and loaded: the same layout bit by bit, others to rounding.

Each scenario trains, saves, and goes on; a fresh process, started from other weights, loads and
goes on too. Scenarios of one world size share their processes.
"""

from __future__ import annotations

import hashlib
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, plain_module
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.store import find_newest
from cdrmix.errors import StateError
from tests.checkpoints import save_checkpoint
from tests.harness import run_ranks

# B batch, T time, D hidden, E experts, F inner width of an expert
BATCH, TIME, HIDDEN, EXPERTS, INNER, VOCABULARY = 8, 6, 12, 4, 10, 37
STEPS_BEFORE, STEPS_AFTER = 3, 5
FP16_SCALE_POWER = 16


@dataclass(frozen=True)
class Layout:
    """How a scenario's engine is laid out and in which precision it computes."""

    zero: int
    expert: int = 1
    precision: str = "fp32"
    accumulation: int = 1
    float32_gradients: bool = False

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


SAME_LAYOUT = {
    1: [
        Layout(zero=1),
        Layout(zero=2, accumulation=2),
        Layout(zero=2, precision="bf16"),
    ],
    2: [
        Layout(zero=1),
        Layout(zero=1, expert=2),
        Layout(zero=2, accumulation=2),
        Layout(zero=2, expert=2),
        Layout(zero=1, expert=2, precision="bf16"),
        Layout(zero=2, precision="bf16", accumulation=2),
        Layout(zero=1, expert=2, precision="bf16", float32_gradients=True),
        Layout(zero=2, precision="fp16"),
    ],
}
# (world size and layout that saved, world size and layout that goes on)
MOVES = [
    ((2, Layout(zero=2, expert=2)), (1, Layout(zero=1))),
    ((2, Layout(zero=2, expert=2)), (1, Layout(zero=1, accumulation=2))),
    ((2, Layout(zero=1)), (2, Layout(zero=2, expert=2))),
    ((2, Layout(zero=1, expert=2)), (2, Layout(zero=2))),
    ((1, Layout(zero=1)), (2, Layout(zero=1, expert=2))),
]


class GroupedExperts(nn.Module):
    """This rank's experts as two tensors, as the product's: [E_local, ...]."""

    def __init__(self, *, first: int, count: int, group_name: str) -> None:
        super().__init__()
        mine = slice(first, first + count)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN)[mine].mul(0.3))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER)[mine].mul(0.3))
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = group_name  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("gecd,efd->gecf", x, self.up).relu().square()
        return torch.einsum("gecf,edf->gecd", inner, self.down)


class TinyModel(nn.Module):
    """Embedding tied with the head, DeepSpeed's MoE, and what is easily forgotten: a parameter
    without a gradient, a frozen one, a vector, a buffer that changes and one that is not saved."""

    def __init__(self, *, seed: int, expert_parallel_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.scale = nn.Parameter(torch.rand(HIDDEN))
        self.frozen = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(5))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.forwards: torch.Tensor
        self.table: torch.Tensor
        self.register_buffer("forwards", torch.tensor(100 * seed))
        self.register_buffer("table", torch.ones(HIDDEN), persistent=False)
        self.moe = MoE(
            HIDDEN,
            nn.Identity(),
            num_experts=EXPERTS,
            ep_size=expert_parallel_size,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )
        count = EXPERTS // expert_parallel_size
        self.moe.deepspeed_moe.experts = GroupedExperts(
            first=runtime.rank() % expert_parallel_size * count,
            count=count,
            group_name=self.moe.expert_group_name,
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.embedding(ids) * self.scale * self.frozen * self.table.to(self.scale.dtype)
        return self.head(x + self.moe(x)[0])


def logical_name(name: str) -> str:
    return name.replace("deepspeed_moe.", "")


def make_engine(layout: Layout, *, seed: int) -> Any:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = TinyModel(seed=seed, expert_parallel_size=layout.expert)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.ndim > 1], "name": "decay", "weight_decay": 0.1}
    plain = {"params": [p for p in trained if p.ndim == 1], "name": "plain", "weight_decay": 0.0}
    groups = split_params_into_different_moe_groups_for_optimizer([decayed, plain])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // runtime.world_size() // layout.accumulation,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": {"stage": layout.zero},
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
    }
    if layout.precision != "fp32":
        config[layout.precision] = {"enabled": True}
    if layout.precision == "fp16":
        # DeepSpeed 0.19.8 refuses fp16 on CPUs, where torch computes it all the same.
        get_accelerator().is_fp16_supported = lambda: True
        # Starts far too high and moves each second step: skipped steps, and a scale to restore.
        config["fp16"] |= {
            "initial_scale_power": FP16_SCALE_POWER,
            "loss_scale_window": 2,
            "hysteresis": 1,
        }
    if layout.float32_gradients:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return runtime.import_deepspeed().initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, layout: Layout, *, first: int, count: int) -> list[float]:
    """Mean loss over all ranks of each step; the global batches are those of any layout."""
    losses = []
    rank, world = runtime.rank(), runtime.world_size()
    for step in range(first, first + count):
        torch.manual_seed(1000 + step)
        ids = torch.randint(VOCABULARY, (BATCH, TIME))
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        total = torch.zeros(1)
        for rows in ids.chunk(layout.accumulation):
            mine = rows.chunk(world)[rank]
            labels = (7 * mine + 3) % VOCABULARY
            loss = nn.functional.cross_entropy(engine(mine).float().flatten(0, 1), labels.flatten())
            total += loss.detach() / layout.accumulation
            engine.backward(loss)
            engine.step()
        losses.append(float(runtime.all_reduce_sum(total)) / world)
    return losses


def fingerprint(engine: Any) -> str:
    """Digest of every bit that training goes on from on this rank."""
    digest = hashlib.sha256()
    for fragment in engine_state.fragments(engine, logical_name):
        digest.update(f"{fragment.name} {fragment.kind} {fragment.span}".encode())
        digest.update(fragment.values.numpy().tobytes())
    for name, tensor in engine.module.state_dict().items():
        digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    digest.update(str((engine_state.counters(engine), engine.micro_steps)).encode())
    return digest.hexdigest()


Ending = tuple[list[float], str]


def ending(engine: Any, layout: Layout) -> Ending:
    """Go on after the save: losses, and a digest of where that leads."""
    losses = train(engine, layout, first=STEPS_BEFORE, count=STEPS_AFTER)
    return losses, fingerprint(engine)


def save_and_go_on(root: str, layouts: list[Layout]) -> list[Ending]:
    runtime.initialize_distributed()
    endings = []
    for layout in layouts:
        engine = make_engine(layout, seed=1)
        train(engine, layout, first=0, count=STEPS_BEFORE)
        write(engine, Path(root) / layout.name, STEPS_BEFORE)
        endings.append(ending(engine, layout))
    runtime.destroy_distributed()
    return endings


def write(engine: Any, root: Path, step: int) -> None:
    held = engine_state.fragments(engine, logical_name)
    save_checkpoint(
        root,
        step,
        held,
        state={"engine": engine_state.counters(engine)},
        rank_state={},
        keep=2,
    )


def load_and_go_on(scenarios: list[tuple[str, Layout]]) -> list[Ending]:
    runtime.initialize_distributed()
    endings = []
    for root, layout in scenarios:
        engine = make_engine(layout, seed=2)
        found = find_newest(Path(root))
        assert found is not None
        with CheckpointFile(found.path) as reader:
            engine_state.load_engine(engine, reader, logical_name)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2] * 3
        endings.append(ending(engine, layout))
    runtime.destroy_distributed()
    return endings


@dataclass(frozen=True)
class Saved:
    """Checkpoints of every layout at one world size, and how their runs went on, by rank."""

    root: str
    endings: list[list[Ending]]


@pytest.fixture(scope="module")
def saved() -> Iterator[dict[int, Saved]]:
    with tempfile.TemporaryDirectory() as folder:
        roots = {world: f"{folder}/{world}" for world in SAME_LAYOUT}
        yield {
            world: Saved(roots[world], run_ranks(save_and_go_on, world, roots[world], layouts))
            for world, layouts in SAME_LAYOUT.items()
        }


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_at_the_same_layout_is_bitwise_the_uninterrupted_run(
    saved: dict[int, Saved], world: int
) -> None:
    layouts = SAME_LAYOUT[world]
    scenarios = [(f"{saved[world].root}/{layout.name}", layout) for layout in layouts]
    resumed = run_ranks(load_and_go_on, world, scenarios)
    for rank in range(world):
        for layout, expected, actual in zip(
            layouts, saved[world].endings[rank], resumed[rank], strict=True
        ):
            assert actual == expected, f"rank {rank}, {layout}"


def load_without(root: str, layout: Layout, lost: str) -> Ending:
    """Load, lose one kind of the state that was loaded, and go on."""
    runtime.initialize_distributed()
    engine = make_engine(layout, seed=2)
    found = find_newest(Path(root) / layout.name)
    assert found is not None
    with CheckpointFile(found.path) as reader:
        engine_state.load_engine(engine, reader, logical_name)
    for master, state in engine.optimizer.optimizer.state.items():
        (master if lost == "param" else state[lost]).data.zero_()
    return ending(engine, layout)


@pytest.mark.parametrize("lost", ["param", "exp_avg", "exp_avg_sq", "step"])
def test_the_comparison_fails_when_a_kind_of_state_is_lost(
    saved: dict[int, Saved], lost: str
) -> None:
    layout = Layout(zero=1)
    ((losses, _),) = run_ranks(load_without, 1, saved[1].root, layout, lost)
    unmoved, _ = saved[1].endings[0][SAME_LAYOUT[1].index(layout)]
    assert losses != pytest.approx(unmoved, rel=1e-4)


def digests_around_a_forward_pass() -> tuple[list[str], list[str]]:
    """Of the fragments that were taken before it."""
    runtime.initialize_distributed()
    engine = make_engine(Layout(zero=1), seed=1)
    held = list(engine_state.fragments(engine, logical_name))

    def digests() -> list[str]:
        return [f"{f.kind} {f.name} {hashlib.sha256(f.values.numpy()).hexdigest()}" for f in held]

    before = digests()
    engine(torch.zeros((1, TIME), dtype=torch.int64))
    after = digests()
    runtime.destroy_distributed()
    return before, after


def test_a_forward_pass_changes_nothing_that_was_taken_for_a_save() -> None:
    ((before, after),) = run_ranks(digests_around_a_forward_pass, 1)
    assert any(digest.startswith("buffer forwards ") for digest in before)
    assert after == before


def test_fp16_skips_steps_and_moves_its_scale_before_and_after_the_save(
    saved: dict[int, Saved],
) -> None:
    layout = Layout(zero=2, precision="fp16")
    found = find_newest(Path(saved[2].root) / layout.name)
    assert found is not None
    with CheckpointFile(found.path) as reader:
        counters = reader.state["engine"]
    assert counters["global_steps"] == STEPS_BEFORE
    assert 0 < counters["skipped_steps"] < STEPS_BEFORE
    assert counters["loss_scaler"]["cur_scale"] < 2**FP16_SCALE_POWER


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_at_another_layout_equals_not_having_moved(
    saved: dict[int, Saved], world: int
) -> None:
    moves = [move for move in MOVES if move[1][0] == world]
    scenarios = [(f"{saved[old].root}/{before.name}", after) for (old, before), (_, after) in moves]
    resumed = run_ranks(load_and_go_on, world, scenarios)[0]
    for ((old, before), _), (losses, _) in zip(moves, resumed, strict=True):
        unmoved, _ = saved[old].endings[0][SAME_LAYOUT[old].index(before)]
        assert losses == pytest.approx(unmoved, rel=1e-5), moves


def test_a_checkpoint_holds_each_parameter_once_in_its_logical_shape(
    saved: dict[int, Saved],
) -> None:
    layout = Layout(zero=2, expert=2)
    trained = {"param", "exp_avg", "exp_avg_sq", "step"}
    found = find_newest(Path(saved[2].root) / layout.name)
    assert found is not None
    with CheckpointFile(found.path) as reader:
        assert {name: (reader.shape(name, reader.kinds(name)[0])) for name in reader.names()} == {
            "embedding.weight": (VOCABULARY, HIDDEN),
            "scale": (HIDDEN,),
            "unused": (5,),
            "frozen": (HIDDEN,),
            "forwards": (),
            "moe.gate.wg.weight": (EXPERTS, HIDDEN),
            "moe.experts.up": (EXPERTS, INNER, HIDDEN),
            "moe.experts.down": (EXPERTS, HIDDEN, INNER),
        }
        kinds = {name: set(reader.kinds(name)) for name in reader.names()}
        assert kinds.pop("frozen") == {"param"}
        assert kinds.pop("forwards") == {"buffer"}
        assert all(value == trained for value in kinds.values())
        assert reader.full("unused", "step").item() == STEPS_BEFORE
        files = list(found.path.glob("*.safetensors"))
    values = sum((found.path / path).stat().st_size for path in files) / 4
    weights = VOCABULARY * HIDDEN + HIDDEN + 5 + EXPERTS * HIDDEN + 2 * EXPERTS * INNER * HIDDEN
    assert values == pytest.approx(3 * weights, rel=0.25)  # headers and step counts on top


def logits_of_a_plain_model(root: str, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a loaded engine, and of a module with all experts filled from the same checkpoint."""
    runtime.initialize_distributed()
    ids = torch.arange(12).view(2, 6)
    engine = make_engine(Layout(zero=1), seed=2)
    module = TinyModel(seed=3, expert_parallel_size=1)
    module.moe.set_deepspeed_parallelism()
    found = find_newest(Path(root) / layout.name)
    assert found is not None
    with CheckpointFile(found.path) as reader:
        engine_state.load_engine(engine, reader, logical_name)
        plain_module.load_module(module, reader, logical_name)
    with torch.no_grad():
        return engine(ids), module(ids)


def test_a_plain_module_gets_all_experts(saved: dict[int, Saved]) -> None:
    root, layout = saved[2].root, Layout(zero=2, expert=2)
    ((from_engine, from_module),) = run_ranks(logits_of_a_plain_model, 1, root, layout)
    assert torch.equal(from_engine, from_module)


def go_back_in_a_live_engine(root: str) -> list[tuple[str, str]]:
    """Fingerprints when saved, and when loaded back after more steps: before and after step 1."""
    runtime.initialize_distributed()
    layout = Layout(zero=2, expert=2)
    engine = make_engine(layout, seed=1)
    pairs = []
    for step in (0, 2):
        train(engine, layout, first=0, count=step)
        write(engine, Path(root), step)
        before = fingerprint(engine)
        losses = train(engine, layout, first=step, count=2)
        with CheckpointFile(Path(root) / str(step)) as reader:
            engine_state.load_engine(engine, reader, logical_name)
        pairs.append((before, fingerprint(engine)))
        assert train(engine, layout, first=step, count=2) == losses
        with CheckpointFile(Path(root) / "0") as reader:
            engine_state.load_engine(engine, reader, logical_name)
    return pairs


def test_a_live_engine_goes_back_bitwise_also_to_before_its_first_step(tmp_path: Path) -> None:
    for pairs in run_ranks(go_back_in_a_live_engine, 2, str(tmp_path)):
        assert [before == after for before, after in pairs] == [True, True]


def fail_on_one_rank(root: str) -> tuple[str, list[str], str]:
    """Save, then save again with a file size limit on rank 1; load with a broken rank 1."""
    runtime.initialize_distributed()
    layout = Layout(zero=1, expert=2)
    engine = make_engine(layout, seed=1)
    write(engine, Path(root), 1)
    train(engine, layout, first=0, count=1)
    if runtime.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(StateError) as failed_save:
        write(engine, Path(root), 2)
    with CheckpointFile(Path(root) / "1") as reader:
        if runtime.rank() == 1:
            reader.names = list  # type: ignore[method-assign]
        with pytest.raises(StateError) as failed_load:
            engine_state.load_engine(engine, reader, logical_name)
    runtime.barrier()
    names = sorted(path.name for path in Path(root).iterdir())
    return str(failed_save.value), names, str(failed_load.value)


def test_a_rank_that_cannot_write_or_read_stops_all_with_one_message(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert first == second
    not_saved, names, not_loaded = first
    assert "step 2 was not saved: rank 1: " in not_saved
    assert "rank-00001.safetensors: File too large" in not_saved
    assert names == ["1", "latest"]
    assert "[rank 1]" in not_loaded
    assert "embedding.weight: not in the checkpoint" in not_loaded


def load_into_other_optimizer(root: str, layout: Layout) -> str:
    runtime.initialize_distributed()
    engine = make_engine(layout, seed=2)
    engine.optimizer.optimizer.param_groups[0]["amsgrad"] = True
    found = find_newest(Path(root) / layout.name)
    assert found is not None
    with (
        CheckpointFile(found.path) as reader,
        pytest.raises(StateError) as refused,
    ):
        engine_state.load_engine(engine, reader, logical_name)
    return str(refused.value)


def test_an_optimizer_that_keeps_other_state_is_refused(saved: dict[int, Saved]) -> None:
    (message,) = run_ranks(load_into_other_optimizer, 1, saved[1].root, Layout(zero=1))
    assert "was saved with optimizer state ['exp_avg', 'exp_avg_sq', 'step']" in message
    assert "max_exp_avg_sq" in message


def round_robin_is_refused() -> str:
    runtime.initialize_distributed()
    engine = make_engine(Layout(zero=2), seed=1)
    engine._config.zero_config.round_robin_gradients = True
    with pytest.raises(AssertionError) as refused:
        list(engine_state.fragments(engine, logical_name))
    return str(refused.value)


def test_round_robin_gradients_are_refused() -> None:
    assert run_ranks(round_robin_is_refused, 1) == ["round_robin_gradients cannot be saved"]

"""The path through fla's kernels but for the kernels: conventions, and the check before their use.

A stand-in follows fla's documented conventions (states [N,H,K,V], packed sequences in one flat
batch) and computes with the reference loop, so that all of this runs without a GPU. The kernels
themselves are tested in tests/gpu.
"""

# B batch, T time, H heads, K key dim, V value dim, N sequences packed into a batch

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Recomputation
from cdrmix.models import compiled, recompute, wkv7_fla
from cdrmix.models.backbone import Backbone
from cdrmix.models.wkv7_reference import DECAY_BOUND
from tests.parity.test_wkv7 import LOOP, assert_equal, ids_of, random_inputs, results

CASE = wkv7_fla._Case(torch.device("cpu"), torch.bfloat16, 16, 16, is_packed=False)


def stand_in(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    safe_gate: bool,
    chunk_size: int,
    disable_recompute: bool,
    lower_bound: float,
) -> tuple[Tensor, Tensor]:
    assert (scale, output_final_state, safe_gate, lower_bound) == (1.0, True, True, -DECAY_BOUND)
    assert chunk_size in (16, 32, 64)
    assert isinstance(disable_recompute, bool)
    tokens = (r, w, k, v, a, b)
    if cu_seqlens is None:
        assert cu_seqlens_cpu is None
        s0 = None if initial_state is None else initial_state.mT
        y, s = LOOP(*tokens, s0=s0)
        return y, s.mT.contiguous()
    assert cu_seqlens_cpu is not None
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert r.shape[0] == 1
    rows, states = [], []
    lengths = cu_seqlens.diff().tolist()
    for n, part in enumerate(zip(*(x.split(lengths, 1) for x in tokens), strict=True)):
        s0 = None if initial_state is None else initial_state[n : n + 1].mT
        y, s = LOOP(*part, s0=s0)
        rows.append(y)
        states.append(s.mT)
    return torch.cat(rows, 1), torch.cat(states)


def with_wrong_gradient(*chunk_sizes: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel whose forward is right and whose dk is halved at some chunk sizes."""

    def kernel(*inputs: Tensor, chunk_size: int, **options: object) -> tuple[Tensor, Tensor]:
        r, w, k, v, a, b = inputs
        if chunk_size in chunk_sizes:
            k = 0.5 * k + 0.5 * k.detach()
        return stand_in(r, w, k, v, a, b, chunk_size=chunk_size, **options)  # type: ignore[arg-type]

    return kernel


class Clock:
    """A clock that stands still but for what kernels add to it."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


clock = Clock()


def slow_at(*chunk_sizes: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel that is right, and takes its time at some chunk sizes."""

    def kernel(*inputs: Tensor, chunk_size: int, **options: object) -> tuple[Tensor, Tensor]:
        if chunk_size in chunk_sizes:
            clock.seconds += 1
        return stand_in(*inputs, chunk_size=chunk_size, **options)  # type: ignore[arg-type]

    return kernel


def forget() -> None:
    """Makes the next call one of a new process."""
    wkv7_fla._settled.cache_clear()
    wkv7_fla._right_chunk_tokens.cache_clear()
    wkv7_fla._timed.clear()


@pytest.fixture
def use_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[object], None]]:
    """Puts a stand-in where fla's kernel is imported; nothing is kept yet."""
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield lambda kernel: monkeypatch.setattr(wkv7_fla, "_kernel", lambda: kernel)
    forget()


SMALL = (1, 40, 2)
OF_A_RUN = (8, 16, 1)  # with the limit below, as a loop over tokens takes its time


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has few tokens timed already, once, by the clock above."""
    monkeypatch.setattr(wkv7_fla, "time", clock)
    monkeypatch.setattr(wkv7_fla, "_TIMED_TOKENS", 128)
    monkeypatch.setattr(wkv7_fla, "_TIMED_RUNS", 1)


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_conventions_are_translated(
    use_kernel: Callable[[object], None], has_state: bool, is_packed: bool
) -> None:
    use_kernel(stand_in)
    inputs = random_inputs(24, 16, 8)[: 7 if has_state else 6]
    ids = ids_of(([9, 15], [1, 1, 22])) if is_packed else None

    def call(*leaves: Tensor, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s0 = leaves[6] if has_state else None
        return wkv7_fla._call(leaves[:6], s0, segment_ids, chunk_tokens=64)

    wanted = results(LOOP, inputs, torch.float64, ids)
    assert_equal(results(call, inputs, segment_ids=ids), wanted)


@pytest.mark.parametrize("is_packed", [True, False])
def test_kernels_that_are_right_are_used_in_chunks_of_64(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture, is_packed: bool
) -> None:
    use_kernel(stand_in)
    assert wkv7_fla._checked_chunk_tokens(CASE._replace(is_packed=is_packed), SMALL) == 64
    assert not caplog.records


@pytest.mark.parametrize(
    ("kernel", "fastest"),
    [(slow_at(64, 16), 32), (slow_at(64, 32), 16), (slow_at(32, 16), 64)],
)
def test_the_fastest_at_the_size_of_the_run_is_used_from_then_on(
    use_kernel: Callable[[object], None], timed: None, kernel: object, fastest: int
) -> None:
    use_kernel(kernel)
    assert wkv7_fla._checked_chunk_tokens(CASE, OF_A_RUN) == fastest
    assert wkv7_fla._checked_chunk_tokens(CASE, SMALL) == fastest


def test_the_fastest_is_not_used_where_it_is_wrong(
    use_kernel: Callable[[object], None], timed: None, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, slow = with_wrong_gradient(64), slow_at(32)

    def kernel(*inputs: Tensor, chunk_size: int, **options: object) -> object:
        return (wrong if chunk_size == 64 else slow)(*inputs, chunk_size=chunk_size, **options)

    use_kernel(kernel)
    assert wkv7_fla._checked_chunk_tokens(CASE, OF_A_RUN) == 16
    assert "Chunks of (32, 16) tokens pass" in caplog.text


def test_a_second_start_neither_checks_nor_times(
    use_kernel: Callable[[object], None], timed: None, tmp_path: Path
) -> None:
    use_kernel(slow_at(64, 16))
    assert wkv7_fla._checked_chunk_tokens(CASE, OF_A_RUN) == 32
    (kept,) = tmp_path.glob("cdrmix/kernel_checks/fla-*.json")
    calls = []
    use_kernel(lambda *_, **options: calls.append(options))
    forget()
    assert wkv7_fla._checked_chunk_tokens(CASE, OF_A_RUN) == 32
    assert not calls
    # of another dtype, or cut short, it is made again
    use_kernel(stand_in)
    forget()
    assert wkv7_fla._checked_chunk_tokens(CASE._replace(dtype=torch.float16), SMALL) == 64
    kept.write_text(kept.read_text()[:-20])
    use_kernel(slow_at(64, 32))
    forget()
    assert wkv7_fla._checked_chunk_tokens(CASE, OF_A_RUN) == 16


def test_a_run_without_room_to_time_takes_the_first_right_one(
    use_kernel: Callable[[object], None], timed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(wkv7_fla, "_seconds", no_room)
    use_kernel(stand_in)
    assert wkv7_fla._checked_chunk_tokens(CASE, OF_A_RUN) == 64


def test_a_wrong_gradient_at_64_leaves_32_and_is_named(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture
) -> None:
    use_kernel(with_wrong_gradient(64))
    assert wkv7_fla._checked_chunk_tokens(CASE, SMALL) == 32
    (record,) = caplog.records
    assert "chunks of 64" in record.message
    assert "dk is off by 0.5, allowed 0.02" in record.message


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_kernels_that_fail_everywhere_are_not_used(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def broken(*inputs: Tensor, **options: object) -> None:
        raise RuntimeError("PassManager::run failed")

    use_kernel(broken if fault == "raises" else with_wrong_gradient(64, 32, 16))
    found = [wkv7_fla._checked_chunk_tokens(CASE, shape) for shape in (SMALL, (2, 1024, 2))]
    assert "PassManager::run failed" in str(found[0]) or "dk is off by 0.5" in str(found[0])
    assert found[1] == found[0]
    (record,) = caplog.records
    for chunk in (64, 32, 16):
        assert f"chunks of {chunk}" in record.message
    assert "chunked form" in record.message
    assert "takes 2.5 times as long" in record.message


def test_gradients_that_are_wrong_only_where_all_is_kept_are_found(
    use_kernel: Callable[[object], None],
) -> None:
    right, wrong = with_wrong_gradient(), with_wrong_gradient(64)

    def kernel(*inputs: Tensor, disable_recompute: bool, **options: object) -> object:
        form = wrong if disable_recompute else right
        return form(*inputs, disable_recompute=disable_recompute, **options)

    use_kernel(kernel)
    assert wkv7_fla._checked_chunk_tokens(CASE, SMALL) == 32


def test_a_recomputed_block_keeps_what_the_backward_pass_reads_both_times(
    use_kernel: Callable[[object], None],
) -> None:
    asked = []

    def kernel(*inputs: Tensor, disable_recompute: bool, **options: object) -> object:
        asked.append(disable_recompute)
        return stand_in(*inputs, disable_recompute=disable_recompute, **options)  # type: ignore[arg-type]

    use_kernel(kernel)
    inputs = [x.requires_grad_() for x in random_inputs(5, 8)[:6]]

    def block(*inputs: Tensor) -> Tensor:
        return wkv7_fla._call(inputs, None, None, chunk_tokens=64)[0]

    recompute._recomputed(block, *inputs).sum().backward()
    assert asked == [True, True]
    block(*inputs)
    assert asked == [True, True, False]


class Passes:
    """A stand-in that counts forward passes of fla's op, those within its backward pass too."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(
        self, *inputs: Tensor, disable_recompute: bool, **options: object
    ) -> tuple[Tensor, Tensor]:
        self.number += 1
        y, s = stand_in(*inputs, disable_recompute=disable_recompute, **options)  # type: ignore[arg-type]
        if y.requires_grad and not disable_recompute:
            y.register_hook(self._count)
        return y, s

    def _count(self, _: Tensor) -> None:
        self.number += 1


@pytest.mark.parametrize(
    ("recomputed", "is_compiled", "passes"),
    [
        ("none", False, 2),
        ("selective", False, 2),
        ("block", False, 2),
        ("spans", False, 2 * 2),  # two spans
        ("none", True, 2),
        # An operator keeps its inputs alone: once more with the block, and once for its gradient.
        ("block", True, 3),
    ],
)
def test_forward_passes_of_the_op_that_a_step_costs_a_block(
    use_kernel: Callable[[object], None],
    monkeypatch: pytest.MonkeyPatch,
    recomputed: Recomputation,
    is_compiled: bool,
    passes: int,
) -> None:
    monkeypatch.setattr(wkv7_fla, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(wkv7_fla, "_checked_chunk_tokens", lambda *_: 64)
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")
    compiled._compiled.cache_clear()
    torch._dynamo.reset()
    counted = Passes()
    use_kernel(counted)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 1, "vocab_size": 256}
    model = Backbone(
        ModelConfig(**sizes, mixers=["rwkv"] * 2, moe=None),
        activation_checkpointing=recomputed,
        sequence_checkpoint_tokens=4 if recomputed == "spans" else None,
        is_compiled=is_compiled,
    )
    model.initialize(seed=0)
    model(torch.arange(8)[None]).hidden.sum().backward()
    assert counted.number == passes * sizes["num_layers"]


def test_the_check_leaves_the_callers_random_numbers_and_gradients_alone(
    use_kernel: Callable[[object], None],
) -> None:
    use_kernel(stand_in)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert wkv7_fla._checked_chunk_tokens(CASE, SMALL) == 64
    assert torch.equal(torch.get_rng_state(), before)


def test_the_real_kernel_takes_what_the_stand_in_takes() -> None:
    module = pytest.importorskip(
        "fla.ops.rwkv7", reason="fla-core is not installed", exc_type=ImportError
    )
    assert set(inspect.signature(stand_in).parameters) <= set(
        inspect.signature(module.chunk_rwkv7).parameters
    )

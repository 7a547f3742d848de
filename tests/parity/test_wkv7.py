"""Every form of the WKV-7 op against the plain loop in float64: y, state and all gradients.

Tolerances are relative, in the Frobenius norm. float32 rounds by 6e-8; 2e-6 leaves room for the
sums of a chunk of up to 32 tokens and for exponents up to 20; the forms stay below 1.1e-6.
"""

# B batch, T time, H heads, K key dim, V value dim, C tokens of a chunk

import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cdrmix.errors import ConfigError
from cdrmix.models import cpu_library, wkv7_cpu
from cdrmix.models.wkv7 import BACKENDS, wkv7
from cdrmix.models.wkv7_chunked import wkv7_chunked
from cdrmix.models.wkv7_reference import DECAY_BOUND

TOLERANCE = 2e-6
LENGTHS = (1, 15, 16, 17, 63, 65, 200)
NAMES = ("y", "s", "dr", "dlw", "dk", "dv", "da", "db", "ds0")
FAST_FORMS = ("chunked", pytest.param("cpp", marks=pytest.mark.compiler))
FORMS = ("reference", *FAST_FORMS)

Form = Callable[..., tuple[Tensor, Tensor]]


def random_inputs(
    time: int, key: int, value: int = 0, *, batch: int = 2, heads: int = 2, fastest: bool = False
) -> list[Tensor]:
    """r, lw, k, v, a, b, s0 as RWKV-7 makes them, float64."""
    generator = torch.Generator().manual_seed(1000 * time + key)
    value = value or key

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    r, k, raw, kk, iclr = normal(5, batch, time, heads, key)
    kk = torch.nn.functional.normalize(kk, dim=-1)
    lw = -DECAY_BOUND * (torch.ones_like(raw) if fastest else raw.mul(2).sigmoid())
    v, s0 = normal(batch, time, heads, value), normal(batch, heads, value, key)
    return [r, lw, k, v, -kk, kk * iclr.sigmoid(), s0]


def results(
    form: Form,
    inputs: list[Tensor],
    dtype: torch.dtype = torch.float32,
    segment_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """y, s and the gradients of a fixed weighted sum of both."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = form(*leaves) if segment_ids is None else form(*leaves, segment_ids=segment_ids)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    gradients = torch.autograd.grad(
        outputs, leaves, [w.to(x) for w, x in zip(weights, outputs, strict=True)]
    )
    found = [x.detach() for x in outputs] + list(gradients)
    return dict(zip(NAMES, found, strict=False))


def run(backend: str) -> Form:
    return functools.partial(wkv7, backend=backend)


LOOP = run("reference")


@functools.cache
def oracle(time: int, key: int, value: int = 0, *, fastest: bool = False) -> dict[str, Tensor]:
    inputs = random_inputs(time, key, value, fastest=fastest)
    return results(LOOP, inputs, torch.float64)


def assert_equal(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    errors = {
        name: ((found[name].double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
        for name, exact in wanted.items()
    }
    assert all(error <= tolerance for error in errors.values()), errors  # fails on nan, too


def assert_identical(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("key", [32, 64, 128])
@pytest.mark.parametrize("time", LENGTHS)
def test_equals_the_loop_in_float64(backend: str, key: int, time: int) -> None:
    assert_equal(results(run(backend), random_inputs(time, key)), oracle(time, key))


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("key", [64, 128])
def test_holds_its_precision_where_all_decay_is_at_its_bound(backend: str, key: int) -> None:
    inputs = random_inputs(200, key, fastest=True)
    assert_equal(results(run(backend), inputs), oracle(200, key, fastest=True))


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize(("key", "value"), [(32, 48), (20, 13)])
def test_key_and_value_sizes_may_differ(backend: str, key: int, value: int) -> None:
    assert_equal(results(run(backend), random_inputs(65, key, value)), oracle(65, key, value))


@pytest.mark.parametrize("backend", FORMS)
def test_no_state_is_the_zero_state(backend: str) -> None:
    *inputs, s0 = random_inputs(65, 32)
    wanted = results(LOOP, [*inputs, torch.zeros_like(s0)], torch.float64)
    del wanted["ds0"]
    assert_equal(results(run(backend), inputs), wanted)


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("output", [0, 1])
def test_gradients_pass_through_each_output_alone(backend: str, output: int) -> None:
    inputs = random_inputs(40, 32)

    def gradients(form: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        loss = form(*leaves)[output].square().sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return dict(zip(NAMES[2:], found, strict=True))

    wanted = gradients(LOOP, torch.float64)
    assert_equal(gradients(run(backend), torch.float32), wanted)


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_two_calls_that_carry_the_state_equal_one(backend: str) -> None:
    def in_two_calls(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, s0 = inputs
        first, s = run(backend)(*(x[:, :43] for x in tokens), s0=s0)
        second, s = run(backend)(*(x[:, 43:] for x in tokens), s0=s)
        return torch.cat([first, second], 1), s

    assert_equal(results(in_two_calls, random_inputs(65, 64)), oracle(65, 64))


def test_decoding_token_by_token_equals_one_call() -> None:
    *tokens, s = (x.float() for x in random_inputs(17, 32))
    y = []
    for t in range(17):
        y_t, s = run("auto")(*(x[:, t : t + 1] for x in tokens), s0=s)
        y.append(y_t)
    wanted = {name: oracle(17, 32)[name] for name in ("y", "s")}
    assert_equal({"y": torch.cat(y, 1), "s": s}, wanted)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 8, 32, 64])
def test_every_chunk_size_is_exact(chunk_tokens: int) -> None:
    def form(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return wkv7_chunked(leaves[:-1], leaves[-1], chunk_tokens=chunk_tokens)

    found = results(form, random_inputs(65, 32, 48), torch.float64)
    assert_equal(found, oracle(65, 32, 48), 1e-13)


def test_hand_derived_gradient_passes_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in random_inputs(7, 3, 2, batch=2, heads=1)]
    ids = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2]])

    def form(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return wkv7_chunked(leaves[:-1], leaves[-1], ids, chunk_tokens=4)

    assert torch.autograd.gradcheck(form, inputs)


# --- segments -------------------------------------------------------------------------------------

# lengths of the segments of each of two rows of 50 tokens; chunks have 16, tiles of cpp 32
LAYOUTS = {
    "on chunk borders": ([16, 16, 18], [32, 18]),
    "within chunks": ([20, 30], [5, 45]),
    "several in a chunk": ([3, 4, 5, 38], [17, 1, 1, 1, 30]),
    "one row whole": ([50], [1, 48, 1]),
    "every token its own": ([1] * 50, [15, 1, 34]),
}


def ids_of(lengths: tuple[list[int], ...]) -> Tensor:
    # ids need not be consecutive nor start at zero
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) * 3 + 5 for row in lengths]
    return torch.stack(rows)


def one_by_one(lengths: tuple[list[int], ...]) -> Form:
    """The loop, called for each segment alone."""

    def form(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        rows, states = [], []
        for i, row in enumerate(lengths):
            *tokens, s = (x[i : i + 1] for x in inputs)
            parts = []
            for j, pieces in enumerate(zip(*(x.split(row, 1) for x in tokens), strict=True)):
                y, s_end = run("reference")(*pieces, s0=s if j == 0 else None)
                parts.append(y)
            rows.append(torch.cat(parts, 1))
            states.append(s_end)
        return torch.cat(rows), torch.cat(states)

    return form


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_segments_equal_separate_calls(backend: str, layout: str) -> None:
    lengths, inputs = LAYOUTS[layout], random_inputs(50, 32, 16)
    wanted = results(one_by_one(lengths), inputs, torch.float64)
    assert_equal(results(run(backend), inputs, segment_ids=ids_of(lengths)), wanted)


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_one_segment_changes_no_bit(backend: str) -> None:
    inputs = random_inputs(65, 32)
    ids = torch.full((2, 65), 4)
    found = results(run(backend), inputs, segment_ids=ids)
    assert_identical(found, results(run(backend), inputs))


# --- how it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FORMS)
def test_equal_calls_give_equal_bits(backend: str) -> None:
    inputs = random_inputs(65, 64)
    assert_identical(results(run(backend), inputs), results(run(backend), inputs))


@pytest.mark.compiler
def test_cpp_gives_equal_bits_on_any_number_of_threads() -> None:
    inputs, threads = random_inputs(65, 32), torch.get_num_threads()
    wanted = results(run("cpp"), inputs)
    try:
        torch.set_num_threads(3)
        assert_identical(results(run("cpp"), inputs), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", FORMS)
def test_sixteen_bit_inputs_are_computed_in_float32(backend: str) -> None:
    inputs = [x.bfloat16() for x in random_inputs(40, 32)]
    found = results(run(backend), inputs, torch.bfloat16)
    assert {found[name].dtype for name in NAMES if name != "s"} == {torch.bfloat16}
    assert found["s"].dtype == torch.float32
    wanted = results(LOOP, inputs, torch.float64)
    assert_equal({"s": found["s"]}, {"s": wanted["s"]})
    assert_equal(found, wanted, 2**-8)  # bfloat16 rounds results, and weights of y, by 2^-9


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_float64_inputs_are_computed_in_float64(backend: str) -> None:
    found = results(run(backend), random_inputs(65, 32), torch.float64)
    assert found["s"].dtype == torch.float64
    assert_equal(found, oracle(65, 32), 1e-13)


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_autocast_does_not_reach_inside(backend: str) -> None:
    inputs = random_inputs(40, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(run(backend), inputs)
    assert_identical(found, results(run(backend), inputs))


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_activation_checkpointing_changes_no_bit(backend: str) -> None:
    inputs = random_inputs(40, 32)

    def checkpointed(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(run(backend), *leaves, use_reentrant=False)

    assert_identical(results(checkpointed, inputs), results(run(backend), inputs))


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_calls_without_gradients_change_no_bit(backend: str) -> None:
    inputs = [x.float().requires_grad_() for x in random_inputs(200, 32)]
    wanted = run(backend)(*inputs)
    with torch.no_grad():
        found = run(backend)(*inputs)
    assert not any(x.requires_grad for x in found)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", FORMS)
def test_inputs_and_gradients_may_have_any_strides(backend: str) -> None:
    def gradients(form: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        def strided(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            y, s = form(*(torch.stack([x, x], -1)[..., 0] for x in leaves))
            return y.sum(), s.sum()  # their gradients have strides of zero

        found = results(strided, random_inputs(40, 32), dtype)
        return {name: found[name] for name in NAMES[2:]}

    wanted = gradients(LOOP, torch.float64)
    assert_equal(gradients(run(backend), torch.float32), wanted)


def chunk_form_by_autograd(
    r: Tensor, lw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor, *, c: int
) -> tuple[Tensor, Tensor]:
    """The chunk form written down and left to autograd; T is a multiple of c."""
    r, lw, k, v, a, b = (
        x.unflatten(1, (-1, c)).permute(0, 3, 1, 2, 4) for x in (r, lw, k, v, a, b)
    )  # [B,H,n,C,*]
    g = lw.cumsum(-2)
    low = torch.ones(c, c, dtype=r.dtype).tril()
    decay_r, decay_a, decay_k = g.exp(), (g - lw).exp(), (-g).exp()
    q_r, q_a, q_k, q_b = r * decay_r, a * decay_a, k * decay_k, b * decay_k
    a_ab, a_ak = ((q_a @ x.mT) * low.tril(-1) for x in (q_b, q_k))
    a_rb, a_rk = ((q_r @ x.mT) * low for x in (q_b, q_k))
    eye = torch.eye(c, dtype=r.dtype)
    w, u0 = (torch.linalg.solve_triangular(eye - a_ab, x, upper=False) for x in (q_a, a_ak @ v))
    last = g[..., -1:, :].exp()
    z, rows = s0.mT, []
    for n in range(r.shape[2]):
        u = u0[:, :, n] + w[:, :, n] @ z
        rows.append(q_r[:, :, n] @ z + a_rb[:, :, n] @ u + a_rk[:, :, n] @ v[:, :, n])
        z = last[:, :, n].mT * (z + q_b[:, :, n].mT @ u + q_k[:, :, n].mT @ v[:, :, n])
    return torch.stack(rows, 2).permute(0, 2, 3, 1, 4).flatten(1, 2), z.mT


def saved_bytes(form: Form, inputs: list[Tensor]) -> int:
    """Bytes that a forward keeps for its backward, inputs not counted."""
    leaves = [x.float().requires_grad_() for x in inputs]
    kept = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        outputs = form(*leaves)  # held, so that no storage is freed and its address used again
    for x in leaves:
        kept.pop(x.untyped_storage().data_ptr(), None)
    assert all(x.requires_grad for x in outputs)
    return sum(kept.values())


@pytest.mark.parametrize(("key", "c"), [(64, 16), (64, 32), (128, 16), (128, 32)])
def test_saves_an_eighth_of_what_autograd_saves(key: int, c: int) -> None:
    inputs = random_inputs(512, key, batch=1)
    by_autograd = functools.partial(chunk_form_by_autograd, c=c)
    small = random_inputs(64, key)
    assert_equal(results(by_autograd, small), results(LOOP, small, torch.float64))
    assert saved_bytes(run("chunked"), inputs) <= saved_bytes(by_autograd, inputs) / 8


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-0.61, 1e-6])
def test_decay_out_of_bounds_is_refused(wrong: float) -> None:
    inputs = [x.float() for x in random_inputs(20, 32)]
    inputs[1][1, 7, 0, 3] = wrong
    with pytest.raises(ValueError, match=r"lw must lie from -exp\(-0.5\)"):
        wkv7(*inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_decay_at_its_bound_is_accepted_in_every_dtype(dtype: torch.dtype) -> None:
    inputs = random_inputs(3, 32, fastest=True)
    wkv7(*(x.to(dtype) for x in inputs))
    inputs[1] = -DECAY_BOUND * torch.full_like(inputs[1], 100).to(dtype).sigmoid()
    wkv7(*(x.to(dtype) for x in inputs))


def test_not_a_number_comes_out_as_such() -> None:
    inputs = [x.float() for x in random_inputs(20, 32)]
    inputs[1][0, 7, 0, 3] = torch.nan
    y, _ = wkv7(*inputs)
    assert y[0, 8:, 0].isnan().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k": torch.zeros(2, 20, 2, 16)}, r"k must be \(2, 20, 2, 32\); given \(2, 20, 2, 16\)"),
        ({"s0": torch.zeros(2, 2, 32, 16)}, r"s0 must be \(2, 2, 32, 32\)"),
        ({"v": torch.zeros(2, 20, 2, 32, dtype=torch.int64)}, "v must be of a float type"),
        ({"r": torch.zeros(2, 0, 2, 32)}, "T at least 1"),
        ({"segment_ids": torch.zeros(2, 20)}, "segment_ids must be integers"),
        ({"segment_ids": torch.zeros(1, 20, dtype=torch.int64)}, r"segment_ids must be \(2, 20\)"),
        ({"segment_ids": -torch.arange(20).expand(2, 20)}, "segment_ids must not fall"),
        ({"backend": "cuda"}, "backend is 'cuda'; allowed: auto, reference, chunked, cpp, fla"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], complaint: str) -> None:
    names = ("r", "lw", "k", "v", "a", "b", "s0")
    inputs = dict(zip(names, (x.float() for x in random_inputs(20, 32)), strict=True))
    with pytest.raises(ValueError, match=complaint):
        wkv7(**(inputs | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cpp", "fla"])
def test_a_backend_that_cannot_run_says_why(backend: str) -> None:
    assert backend in BACKENDS
    with pytest.raises(ConfigError, match=f"'{backend}' cannot be used here: .*Try 'auto'"):
        wkv7(*random_inputs(20, 32), backend=backend)  # float64 on a CPU suits neither


# --- as an operator of a graph --------------------------------------------------------------------


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_traced_form_is_one_operator_and_changes_no_bit(backend: str, is_packed: bool) -> None:
    ids = ids_of(([9, 15], [1, 1, 22])) if is_packed else None
    inputs = random_inputs(24, 16, 8)
    nodes: list[str] = []

    def noting(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(run(backend), backend=noting, fullgraph=True, dynamic=False)
    assert_identical(
        results(traced, inputs, segment_ids=ids), results(run(backend), inputs, segment_ids=ids)
    )
    name = {"cpp": "wkv7_cpp"}.get(backend, f"wkv7_{backend}")
    assert [node for node in nodes if "cdrmix" in node] == [f"cdrmix.{name}.default"]


@pytest.mark.compiler
def test_an_operator_is_what_it_says_of_itself() -> None:
    ids = ids_of(([9, 15], [1, 1, 22]))
    *inputs, s0 = (x.float().requires_grad_() for x in random_inputs(24, 16, 8))
    for name, start in {"wkv7_cpp": s0, "wkv7_chunked": s0, "wkv7_reference": None}.items():
        op = getattr(torch.ops.cdrmix, name).default
        torch.library.opcheck(op, (*inputs, start, ids, 8, name != "wkv7_reference"))


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_vmap_is_refused(backend: str) -> None:
    inputs = [x.float().expand(2, *x.shape) for x in random_inputs(5, 8)]
    with pytest.raises(NotImplementedError, match="a batch dimension of its own"):
        torch.vmap(run(backend))(*inputs)


@pytest.mark.parametrize("name", ["reference", "chunked", "cpp", "fla"])
def test_vmap_is_refused_by_every_operator(name: str) -> None:
    op = getattr(torch.ops.cdrmix, f"wkv7_{name}")
    inputs = [x.float().expand(2, *x.shape) for x in random_inputs(5, 8)]

    def call(*leaves: Tensor) -> Tensor:
        return op(*leaves, None, 8, True)[0]

    with pytest.raises(NotImplementedError, match=r"Put the samples into \[B, T, H, K\]"):
        torch.vmap(call)(*inputs)


@pytest.mark.parametrize("backend", FAST_FORMS)
def test_vmap_is_refused_over_gradients(backend: str) -> None:
    leaves = [x.float().requires_grad_() for x in random_inputs(5, 8)]
    y, _ = run(backend)(*leaves)

    def gradients(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, grad)

    with pytest.raises(NotImplementedError, match="a batch dimension of its own"):
        torch.vmap(gradients)(torch.ones(2, *y.shape))


# --- the compiled kernel --------------------------------------------------------------------------


@pytest.fixture
def fresh_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """As in a new process with an empty cache folder; yields its log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    caplog.set_level(logging.INFO, logger="cdrmix")
    for function in (wkv7_cpu.load_kernel, cpu_library.private_folder):
        function.cache_clear()
    yield caplog
    for function in (wkv7_cpu.load_kernel, cpu_library.private_folder):
        function.cache_clear()


def test_without_a_compiler_the_chunked_form_runs_and_the_log_says_so_once(
    fresh_load: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    inputs = random_inputs(40, 32)
    found = results(wkv7, inputs)
    assert_identical(results(wkv7, inputs), found)
    assert_identical(results(run("chunked"), inputs), found)
    (record,) = fresh_load.records
    assert record.levelno == logging.INFO
    assert "No C++ compiler" in record.message
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler was found"):
        wkv7(*(x.float() for x in inputs), backend="cpp")


@pytest.mark.compiler
def test_a_compile_error_warns_once_with_its_reason(
    fresh_load: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int wkv7_forward( { }")
    monkeypatch.setattr(wkv7_cpu, "_SOURCE", broken)
    inputs = random_inputs(40, 32)
    found = results(wkv7, inputs)
    assert_identical(results(run("chunked"), inputs), found)
    (record,) = fresh_load.records
    assert record.levelno == logging.WARNING
    assert "broken.cpp" in record.message
    assert "error" in record.message


@pytest.mark.compiler
def test_the_kernel_is_built_once_into_the_users_cache(
    fresh_load: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert not isinstance(wkv7_cpu.load_kernel(), str)
    (built,) = (tmp_path / "cache").rglob("*.*")
    before = built.stat().st_mtime_ns
    wkv7_cpu.load_kernel.cache_clear()
    assert not isinstance(wkv7_cpu.load_kernel(), str)
    assert built.stat().st_mtime_ns == before
    inputs = random_inputs(20, 32)
    assert_identical(results(wkv7, inputs), results(run("cpp"), inputs))
    assert not fresh_load.records


@pytest.mark.compiler
def test_a_kernel_cut_short_is_built_again(
    fresh_load: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    compiler = shutil.which("c++")
    assert compiler
    path = cpu_library.library_path(compiler, wkv7_cpu._SOURCE)
    path.write_bytes(b"\x7fELF")
    assert not isinstance(wkv7_cpu.load_kernel(), str)
    assert path.stat().st_size > 1000
    assert not fresh_load.records

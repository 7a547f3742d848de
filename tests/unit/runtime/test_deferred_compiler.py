"""A rank does without torch's compiler until something is compiled, and then has all of it."""

from __future__ import annotations

import subprocess
import sys

from tests.harness import RANK_ENVIRONMENT, ROOT

_PROGRAM = """
import os, sys
import torch
from cdrmix import runtime

runtime.import_deepspeed()
runtime.seed_everything(0, deterministic=True)
assert torch.are_deterministic_algorithms_enabled()
assert torch.is_deterministic_algorithms_warn_only_enabled()


@torch.library.custom_op("ours::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _(x):
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: 2 * grad)


@torch.compiler.assume_constant_result
def one():
    return len([1])


def step():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    double(weight).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.is_grad_enabled() and weight.requires_grad
    return weight.detach()


before = step()
assert "torch._dynamo" not in sys.modules, "something has imported the compiler"
graph = torch.compile(lambda x: double(x) + one(), backend="eager", fullgraph=True)
assert graph(torch.ones(2)).tolist() == [3.0, 3.0]
import torch._inductor.config

assert torch._inductor.config.deterministic, "the compiler was not told of determinism"
assert torch.equal(step(), before)
kept = torch.optim.Optimizer.zero_grad.__wrapped__
assert "call" not in vars(kept)["__dynamo_disable"].__name__, "not as torch has it"
"""


def test_the_compiler_is_imported_with_the_first_function_that_is_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=RANK_ENVIRONMENT | {"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr

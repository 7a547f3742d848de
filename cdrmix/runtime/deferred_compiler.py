"""Keeps torch's compiler out of ranks that compile nothing: importing it takes 2 s of CPU time."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"
# Where torch keeps the form of a function that its compiler leaves alone (2.13: torch/_compile.py).
_KEPT = "__dynamo_disable"
# Methods of optimizers that torch has decorated while it was imported.
_DECORATED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def defer_compiler() -> None:
    """Has torch import its compiler with the first function that is compiled.

    Torch imports it to tell it to leave a function alone, such as an optimizer's `add_param_group`
    or a custom operator's kernel, at the first call of one. What was not imported compiles nothing,
    so until then the function is called as it is, and from then on as torch does it.
    """
    if _COMPILER in sys.modules or hasattr(torch._disable_dynamo, "__wrapped__"):
        return
    for name in _DECORATED:
        _call_as_it_is(getattr(torch.optim.Optimizer, name))
    torch.optim.Adam.step = _step_as_it_is(torch.optim.Adam.step)  # type: ignore[method-assign]
    make = torch._disable_dynamo

    @functools.wraps(make)
    def disable(function: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(disable, recursive=recursive)
        return _call_as_it_is(make(function, recursive))

    torch._disable_dynamo = disable  # type: ignore[assignment]  # for operators made from now on
    torch.compiler.assume_constant_result = _mark_constant


def _mark_constant(function: Any) -> Any:
    """Does what `torch.compiler.assume_constant_result` does (2.13: torch/_dynamo/decorators.py),
    which imports the compiler first."""
    function._dynamo_marked_constant = True
    return function


def _call_as_it_is(decorated: Any) -> Any:
    """Has a function of `torch._disable_dynamo` do without the compiler until it is there."""
    function = getattr(decorated, "__wrapped__", None)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*args, **kwargs)  # type: ignore[misc]
        with contextlib.suppress(AttributeError):  # another thread was here first
            delattr(function, _KEPT)
        return decorated(*args, **kwargs)

    # a torch without these attributes imports its compiler early, and all else is as before
    with contextlib.suppress(AttributeError):
        setattr(function, _KEPT, call)
    return decorated


def _step_as_it_is(step: Callable[..., Any]) -> Callable[..., Any]:
    """Form of an optimizer's step that does without the compiler until it is there.

    Torch imports it in each step to have it begin a new graph around the update (2.13:
    torch/optim/optimizer.py, `_use_grad_for_differentiable`).
    """
    plain = getattr(step, "__wrapped__", None)
    if plain is None or hasattr(step, "hooked"):  # of another torch, or in use by now
        return step

    @functools.wraps(step)
    def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return call

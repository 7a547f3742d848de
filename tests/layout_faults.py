"""Faults that the comparison of a layout with one process must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cdrmix import runtime

Fault = Callable[[], None]  # plants itself into this process


def plant(broken: str) -> None:
    """Put a fault into this process that the comparison must notice."""
    faults: dict[str, Fault] = {
        # The three means are planted in `run_steps`.
        **dict.fromkeys(("", "local mean", "local further mean", "local z"), lambda: None),
        **_of_tensor_ranks(),
        **_of_sequence_ranks(),
        **_of_stages(),
        **_of_statistics(),
        **_of_optimizers(),
        **_of_further_tokens(),
    }
    faults[broken]()


def _of_tensor_ranks() -> dict[str, Fault]:
    from cdrmix.models.moe import Router
    from cdrmix.models.rwkv7 import TimeMix
    from cdrmix.parallel import apply, tensor

    def leave_partial(kind: type[nn.Module]) -> None:
        """Whole parameters of such modules keep the gradients of this tensor rank's part."""
        summed = tensor._sum_gradients_of
        tensor._sum_gradients_of = lambda module, *rest: (
            None if isinstance(module, kind) else summed(module, *rest)
        )

    def misplace_gates() -> None:
        """Gates of a dense feed-forward meet other inner features than theirs."""
        original = tensor.split_block

        def split(block: Any, topology: Any) -> None:
            original(block, topology)
            if getattr(block.ffn, "gate", None) is not None:
                gate = block.ffn.gate.weight
                gate.data.copy_(gate.data.roll(1, 0))

        apply.split_block = split

    return {
        "partial mixes": lambda: leave_partial(TimeMix),
        "partial router": lambda: leave_partial(Router),
        "partial tokens": lambda: setattr(tensor, "enter_region", lambda x, _: x),
        "misplaced gates": misplace_gates,
        "uncounted experts": lambda: setattr(tensor, "_count_in_norm", lambda _: None),
    }


def _of_sequence_ranks() -> dict[str, Fault]:
    from cdrmix.models import attention, mamba
    from cdrmix.parallel import sequence

    angles, next_rank = attention.rotary_angles, sequence._NextRank.apply

    def restart_positions(positions: torch.Tensor, *args: Any) -> Any:
        return angles(positions % (len(positions) // 2), *args)

    def restart() -> None:
        attention.rotary_angles = restart_positions
        attention.shared_angles.cache_clear()

    return {
        "no halo": lambda: setattr(
            sequence._NextRank, "apply", staticmethod(lambda x, _: torch.zeros_like(x))
        ),
        "halo without gradient": lambda: setattr(
            sequence._NextRank, "apply", staticmethod(lambda x, part: next_rank(x.detach(), part))
        ),
        "local positions": restart,
        "window leaks": lambda: setattr(mamba, "_is_same", lambda *_: None),
    }


def _of_stages() -> dict[str, Fault]:
    from cdrmix.parallel import pipeline, zero3

    def without(part: int, value: Callable[[torch.Tensor], Any]) -> Fault:
        """Change what a stage makes of the part-th tensor that crossed the border before it."""
        original: Any = pipeline.PipelineStage._unpack

        def enter(*args: Any) -> Any:
            found = list(original(*args))
            found[part] = value(found[part])
            return found

        return lambda: setattr(pipeline.PipelineStage, "_unpack", enter)

    return {
        "v_first does not cross": without(1, torch.zeros_like),
        "v_first without gradient": without(1, torch.Tensor.detach),
        "statistics of the last stage": without(2, lambda _: None),
        "tied gradients apart": lambda: setattr(
            pipeline.Pipeline, "get_tied_weights_and_groups", lambda _: []
        ),
        "head not counted": lambda: setattr(
            zero3._Head,
            "forward",
            lambda _, hidden, embedding, score: score(hidden, embedding.weight.detach()),
        ),
    }


def _of_statistics() -> dict[str, Fault]:
    from cdrmix.engines import routing
    from cdrmix.parallel import exchange, thresholds

    return {
        "local statistics": lambda: setattr(
            exchange._MeanOverRanks, "apply", staticmethod(lambda x, _: x)
        ),
        "local fractions": lambda: setattr(
            thresholds, "sum_over_data_ranks", lambda statistics, _: statistics
        ),
        "predictor loss is a sum": lambda: setattr(
            routing, "predictor_loss", lambda statistics: statistics[:, 4].mean()
        ),
        "every token is counted as routed": lambda: setattr(
            routing, "tokens_routed", lambda statistics, **_: statistics[:1, :4].sum() / 2
        ),
    }


def _of_optimizers() -> dict[str, Fault]:
    from cdrmix.optimizers import average, muon_layout

    def not_exchanged(_: Any, __: Any, sent: Any, sizes: Any) -> Any:
        """Zeros in place of the pieces of a matrix that other ranks hold."""
        return [iter([torch.zeros(size) for size in of_rank]) for of_rank in sizes]

    def averages_apart() -> None:
        """Let the last rank's part of the average forget by another rule."""
        update, of_last = average._update, {"most": 0.9}

        def apart(*args: Any, **given: Any) -> None:
            is_last = runtime.rank() == runtime.world_size() - 1
            update(*args, **(of_last if is_last else given))

        average._update = apart

    return {
        "local matrices": lambda: setattr(muon_layout.Exchange, "_all_to_all", not_exchanged),
        "averages apart": averages_apart,
    }


def _of_further_tokens() -> dict[str, Fault]:
    from cdrmix.models.mtp import FurtherTokens

    def further(change: Callable[..., Any]) -> Fault:
        """Change the tokens read and the segment ids of what predicts further tokens."""
        original = FurtherTokens.forward

        def forward(parts: Any, hidden: Any, following: Any, embed: Any, segment_ids: Any) -> Any:
            following, segment_ids = change(following, segment_ids)
            return original(parts, hidden, following, embed, segment_ids)

        return lambda: setattr(FurtherTokens, "forward", forward)

    return {
        "further tokens across documents": further(lambda following, ids: (following, None)),
        "no token of the next rank": further(
            lambda following, ids: (
                torch.cat([following[:, :-1], torch.zeros_like(following[:, -1:])], 1),
                ids,
            )
        ),
    }

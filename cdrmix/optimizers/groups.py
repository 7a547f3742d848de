"""Parameter groups of Muon: matrices by name and part of the model, all else for AdamW."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.optimizers.muon import Muon
from cdrmix.planning.counts import parameters
from cdrmix.planning.muon import takes_muon


def muon(model: nn.Module, config: Config, logical_name: Callable[[str], str]) -> Muon:
    """Muon for the matrices of a model and AdamW for the rest; each step sets its learning rates.

    There are up to two dense groups and one for each group of experts, the same on every stage of a
    pipeline: DeepSpeed runs collectives group by group over all stages, and takes no empty group.

    Args:
        model: this rank's part.
        config: of the run.
        logical_name: gives a parameter of the module its name in checkpoints.
    Raises:
        PlanError: if a trained parameter is not among those that planning knows.
    """
    known = {parameter.name: parameter for parameter in parameters(config.model)}
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        logical = logical_name(name)
        if logical not in known:
            raise PlanError(
                f"optimizer.kind = muon: nothing tells which part of the model {logical} is, and "
                "Muon is for some parts alone. Try optimizer.kind = adamw"
            )
        is_muon = takes_muon(known[logical], config.optimizer)
        experts = ""
        if not getattr(parameter, "allreduce", True):
            experts = parameter.group_name  # type: ignore[attr-defined]
        groups.setdefault((is_muon, experts), []).append(parameter)
    training, settings = config.training, config.optimizer
    factor = 1.0
    if settings.learning_rate is not None:
        factor = settings.learning_rate / training.learning_rate
    return Muon(
        [
            {
                # Of experts, the name by which DeepSpeed finds their process groups.
                "name": experts or ("matrices" if is_muon else "others"),
                "params": members,
                "is_muon": is_muon,
                "decay": training.weight_decay,
                "rate_factor": factor if is_muon else 1.0,
                **({"moe": True} if experts else {}),
            }
            for (is_muon, experts), members in sorted(groups.items(), key=_order)
        ],
        settings,
        training,
    )


def _order(group: tuple[tuple[bool, str], object]) -> tuple[str, bool]:
    """Dense groups first, Muon's before AdamW's."""
    (is_muon, experts), _ = group
    return experts, not is_muon

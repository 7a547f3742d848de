"""The `optimizer` section: AdamW, Muon for matrices with AdamW for the rest, or a user's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cdrmix.config.plugin import NameOrPlugin, is_plugin
from cdrmix.config.section import Section


class OptimizerConfig(Section):
    """Optimizer of Stage A. AdamW's decays, denominator offset and gradient_clipping are in
    `training`; with Muon they are those of the parameters that are no hidden matrices. weight_decay
    is that of both. Stage B has an AdamW of its own."""

    kind: Annotated[str, NameOrPlugin(("adamw", "muon"))] = "adamw"
    """muon: hidden matrices by orthogonalised momentum, all other parameters by AdamW. The keys
    below options are muon's, and without effect otherwise."""
    options: dict[str, Any] = {}
    """Options of an optimizer of yours, which it checks itself."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the matrices under muon (per step); null: training.learning_rate."""
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's decay of the momentum (ratio).")
    nesterov: bool = True
    """Orthogonalise the momentum after the gradient is added once more."""
    scale: Literal["match_rms", "spectral", "unit_rms"] = "match_rms"
    """Factor on an orthogonalised update of r rows and c columns. match_rms: 0.2 * sqrt(max(r, c)),
    so that learning rates of AdamW fit; spectral: sqrt(max(1, r / c)); unit_rms: sqrt(r / c)."""
    newton_schulz: Literal["simple", "quintic", "polar"] = "simple"
    """Coefficients of the Newton-Schulz iteration. simple: one set for all steps; quintic: a tuned
    set for each of five steps; polar: Polar Express."""
    newton_schulz_steps: int = Field(5, ge=1, le=10, description="Newton-Schulz steps (count).")
    neuron_norm: bool = False
    """Divide each row of the orthogonalised update by the root of its running mean square, and
    restore the norm of the whole (NorMuon)."""
    neuron_beta: float = Field(0.95, ge=0, lt=1)
    """Decay of that second moment (ratio)."""
    experts: Literal["muon", "adamw"] = Field("muon", description="Optimizer of the experts.")
    low_rank: Literal["muon", "adamw"] = "adamw"
    """Optimizer of the low-rank pairs of RWKV blocks."""
    max_spike: float | None = Field(10.0, gt=1)
    """A step behind training.warmup_steps in which the norm of the matrices' gradients is more than
    so many times its median over the last 16 steps leaves them out of the momentum, is told in the
    log and counted as optimizer/spikes (ratio); null: none does."""
    tensor: Literal["refuse", "blockwise"] = "refuse"
    """With tensor ranks: refuse Muon, or orthogonalise each rank's part by itself, which is another
    algorithm."""

    @model_validator(mode="after")
    def _options_have_an_owner(self) -> OptimizerConfig:
        if self.options and not is_plugin(self.kind):
            raise ValueError(
                f"options are for an optimizer of yours, and kind = {self.kind} has none. Leave "
                "them out"
            )
        return self

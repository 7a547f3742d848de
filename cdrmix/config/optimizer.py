"""The `optimizer` section: AdamW, or Muon for matrices with AdamW for the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cdrmix.config.section import Section


class OptimizerConfig(Section):
    """Optimizer of Stage A. AdamW's decays and denominator offset are in `training`; with Muon they
    are those of the parameters that are no hidden matrices."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: hidden matrices by orthogonalised momentum, all other parameters by AdamW."""
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
    """Scale each row of the orthogonalised update by its running second moment (NorMuon)."""
    neuron_beta: float = Field(0.95, ge=0, lt=1)
    """Decay of that second moment (ratio)."""
    experts: Literal["muon", "adamw"] = Field("muon", description="Optimizer of the experts.")
    low_rank: Literal["muon", "adamw"] = "adamw"
    """Optimizer of the low-rank pairs of RWKV blocks."""
    max_spike: float | None = Field(10.0, gt=1)
    """Gradients of matrices larger than so many times their running median norm are left out of the
    momentum (ratio); null: none is."""
    tensor: Literal["refuse", "blockwise"] = "refuse"
    """With tensor ranks: refuse Muon, or orthogonalise each rank's part by itself, which is another
    algorithm."""

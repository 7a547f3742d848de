"""Sections of the `model` section: parts that a model may have or not."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from cdrmix.config.section import Section


def _check_top_k(sizes: MoEConfig | RoutingMambaConfig) -> None:
    """Raises ValueError if a token would be sent to more experts than there are."""
    if sizes.top_k > sizes.num_experts:
        raise ValueError(
            f"top_k = {sizes.top_k} is more than num_experts = {sizes.num_experts}; "
            "a token goes to distinct experts"
        )


def _rising(layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Returns a list of layers; raises ValueError if it is none in rising order."""
    if layers is not None and (list(layers) != sorted(set(layers)) or layers[0] < 0):
        raise ValueError("numbers of layers from 0 on, each once, in rising order")
    return layers


class MoEConfig(Section):
    """Mixture-of-experts feed-forward: experts of model.ffn_activation, top-k routed."""

    num_experts: int = Field(8, ge=1, description="Experts per layer (count).")
    top_k: int = Field(2, ge=1, description="Experts that each token is sent to (count).")
    expert_hidden_size: int = Field(ge=1, description="Inner width of one expert (features).")
    layers: tuple[int, ...] | None = Field(None, min_length=1, strict=False)
    """Layers whose feed-forward is of experts, from 0 at the input, rising; the others are dense.
    null: all."""
    # Below 1, tokens would be dropped even if all experts were chosen equally often.
    capacity_factor: float = Field(1.25, ge=1.0)
    """Slots per expert over tokens * top_k / num_experts (ratio); also the reference of the
    overflow when nothing is dropped."""
    drop_tokens: bool = False
    """True: assignments beyond the capacity are dropped in training. False: dropless. Evaluation
    and Stage B are always dropless."""
    load_balance_weight: float = Field(0.01, ge=0)
    """Weight of the load-balance loss, mean over layers (ratio)."""
    z_loss_weight: float = Field(1e-3, ge=0)
    """Weight of the router z-loss, mean over layers (ratio)."""

    @field_validator("expert_hidden_size")
    @classmethod
    def _rows_are_aligned(cls, value: int) -> int:
        # torch's grouped_mm: "strides should be multiple of 16 bytes", which are 8 numbers in bf16
        if value % 8:
            raise ValueError(
                f"expert_hidden_size = {value} is no multiple of 8, which the grouped matrix "
                f"product of the experts needs. Try {value - value % 8 + 8}"
            )
        return value

    @field_validator("layers")
    @classmethod
    def _layers_rise(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return _rising(value)

    @model_validator(mode="after")
    def _top_k_fits(self) -> MoEConfig:
        _check_top_k(self)
        return self


class LoraConfig(Section):
    """Low-rank adapters of a frozen Hugging Face model (peft); null trains the whole model."""

    rank: int = Field(16, ge=1, description="Rank of an adapter (features).")
    alpha: float | None = Field(None, gt=0)
    """Scale of an adapter times its rank (ratio); twice the rank when left out."""
    # peft refuses dropout on parameters of experts.
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are dropped (ratio); 0 where experts are adapted."""
    target_modules: tuple[str, ...] | None = Field(None, min_length=1, strict=False)
    """Names of linear layers that get adapters; null: those of the family, never routers."""
    experts: bool = True
    """Adapt the experts of MoE layers too; false: they stay as they are."""


class MtpConfig(Section):
    """Multi-token prediction: parts that predict tokens beyond the next one, for training and for
    speculative decoding."""

    kind: Literal["independent", "deepseek"] = "independent"
    """independent: a head for each further token, from the last hidden state (Gloeckle et al.,
    arXiv 2404.19737). deepseek: a block for each further token, from the hidden state and the
    embedding of the token before (DeepSeek-V3, arXiv 2412.19437)."""
    num_tokens: int = Field(4, ge=2)
    """Tokens predicted at each position, the next one included (count)."""
    head: Literal["linear", "block"] = "linear"
    """Independent head before the tied unembedding: a linear map, or a block of attention."""

    @property
    def has_blocks(self) -> bool:
        """True if further tokens are predicted by blocks, which have a dense feed-forward."""
        return self.kind == "deepseek" or self.head == "block"

    @model_validator(mode="after")
    def _head_is_of_the_kind(self) -> MtpConfig:
        if self.kind == "deepseek" and self.head != "linear":
            raise ValueError(
                f"head = {self.head} is for kind = independent: a deepseek depth has a block "
                "anyway. Leave it out"
            )
        return self


class MambaConfig(Section):
    """Mamba-1 mixer (Gu and Dao, arXiv 2312.00752)."""

    state_size: int = Field(16, ge=1, description="States of an inner feature (count).")
    expand: int = Field(2, ge=1, description="Inner features over hidden_size (ratio).")
    conv_size: int = Field(4, ge=2, description="Tokens that the convolution reads (count).")
    dt_rank: int | None = Field(None, ge=1)
    """Rank of the projection to time steps (features); hidden_size / 16, rounded up, when left
    out."""

    def rank(self, hidden_size: int) -> int:
        """Rank of the projection to time steps (features)."""
        return self.dt_rank or math.ceil(hidden_size / 16)


class RoutingMambaConfig(Section):
    """Routing Mamba (arXiv 2506.18145): a Mamba mixer with experts for its input, gate and output
    projections, which one router chooses."""

    num_experts: int = Field(8, ge=1, description="Experts of a mixer (count).")
    top_k: int = Field(1, ge=1, description="Experts that each token is sent to (count).")
    load_balance_weight: float = Field(0.01, ge=0)
    """Weight of the load-balance loss, mean over such mixers (ratio)."""
    z_loss_weight: float = Field(1e-3, ge=0)
    """Weight of the router z-loss, mean over such mixers (ratio)."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> RoutingMambaConfig:
        _check_top_k(self)
        return self


class ModConfig(Section):
    """Mixture of Depths: some blocks take a share of the tokens, and the others pass by (Raposo et
    al., arXiv 2404.02258)."""

    capacity: float = Field(0.75, gt=0, le=1)
    """Share of the tokens that a routed block takes (ratio)."""
    mode: Literal["threshold", "topk"] = "threshold"
    """threshold: tokens whose score is above a threshold, which is moved until they are `capacity`
    of all; causal, in training too. topk: in training exactly the ceil(capacity * T) tokens of a
    sequence with the highest scores; in evaluation and decoding those that a predictor expects
    among them, as the highest of a sequence are not known before its end."""
    layers: tuple[int, ...] | None = Field(None, min_length=1, strict=False)
    """Blocks that are routed, from 0 at the input, rising; null: all but the first RWKV block,
    whose values all later RWKV blocks mix in, for every token."""
    predictor_hidden: int = Field(128, ge=1, description="Inner width of a predictor (features).")
    predictor_weight: float = Field(0.01, gt=0)
    """Weight of the predictors' cross-entropy, mean over routed blocks (ratio); topk only."""
    # Of a tiny model, 0.05 left fractions of 0.34 to 0.59 after 120 steps, for capacities of 0.5
    # and 0.75; these come within 0.045 of them, in most runs within 0.02.
    threshold_rate: float = Field(1.0, gt=0)
    """Step of a threshold at the start of the run, in standard deviations of the scores for a
    fraction that is off by 1 (ratio)."""
    final_threshold_rate: float = Field(0.3, ge=0)
    """The same at the end of the run; in between it changes linearly (ratio)."""

    @field_validator("layers")
    @classmethod
    def _layers_rise(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return _rising(value)

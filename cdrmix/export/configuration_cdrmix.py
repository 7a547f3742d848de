"""Configuration of a CDRmix model for transformers; copied as it is into each exported folder."""

from __future__ import annotations

from dataclasses import field

from transformers import PreTrainedConfig

LAYER_KINDS = ("rwkv", "transformer")
RECURRENCES = ("auto", "loop", "chunked")


class CDRMixConfig(PreTrainedConfig):
    """Dimensions of an RWKX-V model: RWKV-7 and Transformer blocks, with or without experts.

    Args:
        layer_kinds: `rwkv` or `transformer` for each block from the input; RWKV by default. Not
            named `layer_types`: from that transformers would make a cache of its own kinds, and
            compile a model of RWKV blocks alone.
        intermediate_size: inner width of the dense feed-forward (features).
        num_experts: experts of each block; 0 for a dense model.
        num_experts_per_tok: experts that each token is sent to.
        moe_intermediate_size: inner width of one expert (features).
        decay_rank, iclr_rank, value_rank, gate_rank: ranks of the paths of an RWKV time mix.
        mtp: how the weights predict tokens beyond the next one; the classes here do not use them.
        rope_theta: base of the rotary frequencies of Transformer blocks.
        max_position_embeddings: tokens of a training sequence. No table ends there.
        recurrence: way to compute the RWKV recurrence: `loop` over tokens, `chunked` matrix
            products, or `auto`, which takes chunks where there are 16 tokens or more.
    """

    model_type = "cdrmix"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    layer_kinds: list[str] = field(default_factory=list)
    intermediate_size: int = 512
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 256
    decay_rank: int = 32
    iclr_rank: int = 32
    value_rank: int = 32
    gate_rank: int = 64
    mtp: dict | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    group_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    recurrence: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs) -> None:
        """Fills in `layer_kinds`."""
        self.layer_kinds = self.layer_kinds or ["rwkv"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def check_model(self) -> None:
        """Raises ValueError for what a model cannot be made of.

        Called by the model: `from_pretrained` sets the values of a user after `__post_init__`.
        """
        wrong = [kind for kind in self.layer_kinds if kind not in LAYER_KINDS]
        if wrong or len(self.layer_kinds) != self.num_hidden_layers:
            raise ValueError(
                f"layer_kinds must name {self.num_hidden_layers} blocks, each one of "
                f"{', '.join(LAYER_KINDS)}; given {self.layer_kinds}"
            )
        if self.recurrence not in RECURRENCES:
            raise ValueError(
                f"recurrence must be one of {', '.join(RECURRENCES)}; given {self.recurrence!r}"
            )
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"num_attention_heads * head_dim = {self.num_attention_heads * self.head_dim} is "
                f"not hidden_size = {self.hidden_size}"
            )

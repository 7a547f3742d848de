"""A causal model of Hugging Face transformers as the training loop sees it."""

# B batch, T time, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.hf.packing import (
    Documents,
    document_positions,
    document_spans,
    flash_attention_boundaries,
    stateful_mixers,
)
from cdrmix.hf.routing import Routing
from cdrmix.models.backbone import Output
from cdrmix.models.softmax_cpu import label_scorer
from cdrmix.objectives.language_model import HeadLoss, LabelWeights, linear_losses, score_labels

# (hidden states, weight of the head) -> logits or loss
Score = Callable[[Tensor, Tensor], Any]


def head_losses(hidden: Tensor, weight: Tensor, labels: Tensor, weights: LabelWeights) -> HeadLoss:
    """Computes `linear_losses` under a whole head, by the C++ softmax where that can run."""
    score = label_scorer(hidden, weight) or score_labels
    return linear_losses(hidden, weight, labels, weights, score)


class Head(nn.Module):
    """Use of a model's head: a module of its own, so that ZeRO-3 gathers the weight for it.

    Args:
        weight: gives the head's weight, [V, D], a parameter of another module.
    """

    def __init__(self, weight: Callable[[], nn.Parameter]) -> None:
        super().__init__()
        self._weight = weight
        if hasattr(weight(), "ds_id"):  # partitioned by ZeRO-3
            runtime.import_deepspeed().zero.register_external_parameter(self, weight())

    def forward(self, hidden: Tensor, score: Score) -> Any:
        return score(hidden, self._weight())

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the next token, [..., D] -> [..., V]."""
        logits: Tensor = self(hidden, F.linear)
        return logits

    def losses(self, hidden: Tensor, labels: Tensor, weights: LabelWeights) -> HeadLoss:
        """Computes `next_token_losses` of hidden states [..., D]."""
        losses: HeadLoss = self(hidden, partial(head_losses, labels=labels, weights=weights))
        return losses


class SeenTokens:
    """Tokens so far, the state of a family that has no cache: each step reads them again."""

    def __init__(self, input_ids: Tensor) -> None:
        self.input_ids = input_ids


class HuggingFaceModel(nn.Module):
    """Causal model behind the protocol `LanguageModel`.

    Args:
        causal: transformers' ...ForCausalLM, or PEFT's wrapper around it.
        config: sizes of it.
    """

    def __init__(self, causal: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.causal: Any = causal
        self.config = config
        # Functions, as the modules must not be registered a second time.
        self.embedding = Head(lambda: self.causal.get_output_embeddings().weight)
        self.documents = Documents()
        mixers = stateful_mixers(causal)
        self.documents.keep_apart_in(mixers)
        self._has_mixers = bool(mixers)
        for mixer in mixers:
            # ZeRO-3 gathers all weights of a mixer around its call, and none within: ranks have
            # different numbers of documents, and must gather equally often.
            mixer._z3_leaf = True  # type: ignore[assignment]
        self.routing = Routing(causal, config.moe)

    @property
    def device(self) -> torch.device:
        """Device that inputs must be on."""
        return self.causal.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.causal.get_input_embeddings().weight.dtype

    @property
    def family(self) -> str:
        """Name of the architecture in config.json, its model_type."""
        return str(self.causal.config.model_type)

    @property
    def num_routers(self) -> int:
        """Layers with a router."""
        return len(self.routing.routers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., D] -> [..., V]."""
        return self.embedding.logits(hidden)

    def forward(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Output:
        """Computes the hidden states of every position of `input_ids`, [B, T], int64.

        Args:
            segment_ids: document of each token, [B, T]; None: each row is one.
            state: of an earlier call, to go on from; without `segment_ids`.
            return_state: give the state after the last token.
        """
        if state is not None or return_state:
            assert segment_ids is None, "text is generated for one document"
            return self._decode(input_ids, state)
        options: dict[str, Any] = {}
        self.documents.spans = None
        ids = input_ids
        if segment_ids is not None:
            positions = document_positions(segment_ids)
            # Told apart by positions alone, rows with a batch of others would be seen as one.
            is_flash = "flash" in str(self._decoder.config._attn_implementation)
            if is_flash:
                ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
            if is_flash or self._has_mixers:
                self.documents.spans = document_spans(positions)
            if is_flash:
                options = flash_attention_boundaries(self.documents.spans or [], ids.device)
            options["position_ids"] = positions
        with self.routing.recorded():
            # The default makes a cache, and with one all documents of a row would see each other.
            output = self._decoder(ids, use_cache=False, **options)
            statistics = self.routing.statistics()
        if not torch.is_grad_enabled():
            self.documents.spans = None
        hidden = output.last_hidden_state
        return Output(hidden.view(*input_ids.shape, hidden.shape[-1]), statistics, None)

    @property
    def _decoder(self) -> Any:
        return self.causal.get_decoder()

    def _decode(self, input_ids: Tensor, state: Any) -> Output:
        """Hidden states of the tokens after a state, and the state after them."""
        self.documents.spans = None
        if isinstance(state, SeenTokens):
            input_ids = torch.cat([state.input_ids, input_ids], dim=1)
            state = None
        output = self._decoder(input_ids, past_key_values=state, use_cache=True)
        cache = output.past_key_values
        after = SeenTokens(input_ids) if cache is None else cache
        return Output(output.last_hidden_state, None, after)

"""A pipelined backbone for evaluation and decoding, called as `Backbone` is.

B batch, T time, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Output, TokenEmbedding
from cdrmix.models.block import BlockState
from cdrmix.parallel import border
from cdrmix.parallel.stages import Stage


class StagedBackbone:
    """All stages in turn, without gradients; the ranks of a pipeline call each method together.

    Results are complete on the last stage only: losses are counted there. Logits are the
    same on every rank, so that all go on with the same token.

    Args:
        stage: of this rank.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage, self._topology = stage, stage.topology
        self._weight = next(stage.parameters())

    @property
    def config(self) -> ModelConfig:
        """Dimensions of the whole model."""
        return self._stage.config

    @property
    def device(self) -> torch.device:
        """Device that inputs must be on."""
        return self._weight.device

    @property
    def embedding(self) -> TokenEmbedding:
        """The tied head; there on the first and the last stage."""
        return self._stage.embedding

    @property
    def training(self) -> bool:
        """True in training mode."""
        return self._stage.training

    def train(self, mode: bool = True) -> None:
        """Set training mode."""
        self._stage.train(mode)

    def eval(self) -> None:
        """Set evaluation mode."""
        self._stage.eval()

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        state: list[BlockState] | None = None,
        return_state: bool = False,
    ) -> Output:
        """As `Backbone.forward`, with what it gives whole on the last stage.

        Before it `hidden` is what the stage handed on, and statistics and state are those up to
        here and of the stage's own blocks.
        """
        tokens = (input_ids.shape[0], input_ids.shape[1])
        arrived = input_ids
        if not self._topology.is_first_stage:
            parts = self._stage.arriving(tokens, self._weight.dtype)
            arrived = self._weight.new_empty(border.num_elements(parts, self._weight.dtype))
            torch.distributed.recv(arrived, self._topology.rank_at(self._topology.stage - 1))
        output, leaving = self._stage.advance(
            arrived,
            tokens,
            segment_ids=segment_ids,
            state=state,
            return_state=return_state,
        )
        if leaving is not None:
            following = self._topology.rank_at(self._topology.stage + 1)
            torch.distributed.send(leaving, following)
        return output

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., D] -> [..., V], from the last stage to every rank."""
        last = self._topology.degrees.pipeline - 1
        if self._topology.is_last_stage:
            logits = self.embedding.logits(hidden)
        else:
            logits = hidden.new_empty(*hidden.shape[:-1], self.config.vocab_size)
        torch.distributed.broadcast(
            logits, src=self._topology.rank_at(last), group=self._topology.pipeline_group
        )
        return logits

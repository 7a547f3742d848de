"""Pipeline stages: the backbone's blocks over ranks, in DeepSpeed's PipelineModule.

To DeepSpeed a stage is one layer. Residual stream, v_first and the router statistics of all layers
so far cross a stage boundary together (`exchange.pack`), and the segment ids beside them where
documents are apart; the loss is computed on the last stage, from the statistics of all layers.
v_first crosses once the first RWKV layer has computed it.

The tied embedding is on the first stage and on the last, which is its head. DeepSpeed sums both
gradients before the data ranks are averaged, in an order that may differ between the stages, so
the copies would part in the last bits: the first stage's counts, is saved, and replaces the other
after each step.

`StagedBackbone` runs the stages for evaluation and decoding, called as `Backbone` is.

B batch, T tokens of this sequence rank, D hidden, V vocabulary, L layers up to a stage boundary,
S router statistics.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Output, TokenEmbedding
from cdrmix.models.block import Block, BlockState, RMSNorm
from cdrmix.models.moe import num_statistics
from cdrmix.models.recompute import run_blocks
from cdrmix.parallel import exchange
from cdrmix.parallel.exchange import Part
from cdrmix.parallel.tensor import mark_copy
from cdrmix.parallel.topology import Topology

runtime.import_deepspeed()  # first of all imports of it: chooses its accelerator and its ops

from deepspeed.runtime.pipe.module import PipelineModule  # noqa: E402
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # noqa: E402


class PipelineStage(nn.Module):
    """Part of the backbone on one pipeline stage; parameters are named as in `Backbone`.

    Args:
        config: dimensions of the whole model.
        topology: of this rank.
        layers: of this stage.
        micro_batch: (B, T) of training.
        block: makes the block of a layer.
        activation_checkpointing: recompute each block in the backward pass.
        sequence_checkpoint_tokens: tokens that are recomputed together; None: all.
    """

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layers: range,
        *,
        micro_batch: tuple[int, int],
        block: Callable[[ModelConfig, int], Block],
        activation_checkpointing: bool,
        sequence_checkpoint_tokens: int | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.topology = topology
        self.layers = layers
        self.v_first_arrives = "rwkv" in config.layer_kinds()[: layers.start]
        # fixed, because the flat tensor that arrives does not tell the shapes in it
        self.micro_batch = micro_batch
        self.activation_checkpointing = activation_checkpointing
        self.sequence_checkpoint_tokens = sequence_checkpoint_tokens
        # Loss of the next micro-batch on the last stage; set for each step. It belongs to the
        # forward pass: DeepSpeed's bf16 optimizer clears gradients where the backward pass reaches
        # what forward gave (0.19.8, runtime/bf16_optimizer.py), and the head's would be among them.
        self.objective: Callable[[Output], Tensor] | None = None
        if topology.is_first_stage or topology.is_last_stage:
            self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        if topology.is_first_stage:
            self.embedding_norm = RMSNorm(config.hidden_size)
        self.blocks = nn.ModuleDict({str(layer): block(config, layer) for layer in layers})
        if topology.is_last_stage:
            self.final_norm = RMSNorm(config.hidden_size)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        """Runs a micro-batch of training through this stage.

        Args:
            inputs: input ids [B, T] on the first stage, elsewhere the packed tensor of the stage
                before; then segment ids [B, T] if documents are apart.
        Returns:
            Packed tensor for the next stage, with the same segment ids; on the last stage the loss.
        """
        # On their way beside the packed tensor, not in it: as integers they have no gradient, and
        # DeepSpeed sends none back for them (0.19.8, runtime/pipe/engine.py).
        arrived, *segment_ids = inputs
        output, leaving = self.advance(
            arrived, self.micro_batch, segment_ids=segment_ids[0] if segment_ids else None
        )
        if leaving is not None:
            return leaving, *segment_ids
        assert self.objective is not None, "the step sets it"
        return self.objective(output)

    def advance(
        self,
        arrived: Tensor,
        tokens: tuple[int, int],
        *,
        segment_ids: Tensor | None = None,
        state: list[BlockState] | None = None,
        return_state: bool = False,
    ) -> tuple[Output, Tensor | None]:
        """Runs this stage's blocks.

        Args:
            arrived: input ids [B, T] on the first stage, elsewhere the packed tensor of the stage
                before.
            tokens: (B, T).
            segment_ids: document of each token, [B, T].
            state: of this stage's blocks, where an earlier call stopped.
            return_state: return the state after token T too.
        Returns:
            Output up to this stage, whose hidden is normalised on the last stage only; and the
            packed tensor for the next stage, None on the last.
        """
        if self.topology.is_first_stage:
            x = self.embedding_norm(self.embedding(arrived))
            v_first = earlier = None
        else:
            x, v_first, earlier = self._unpack(arrived, tokens)
        x, v_first, statistics, after = run_blocks(
            self.blocks.values(),
            x,
            v_first,
            state=state,
            segment_ids=segment_ids,
            return_state=return_state,
            recompute=self.activation_checkpointing,
            sequence_checkpoint_tokens=self.sequence_checkpoint_tokens,
        )
        # of all layers so far: the last stage needs them all, as it computes the routers' losses
        if statistics is not None and earlier is not None:
            statistics = torch.cat([earlier, statistics])
        if self.topology.is_last_stage:
            return Output(self.final_norm(x), statistics, after), None
        leaving = exchange.pack([part for part in (x, v_first, statistics) if part is not None])
        return Output(x, statistics, after), leaving

    def arriving(self, tokens: tuple[int, int], dtype: torch.dtype) -> list[Part]:
        """Returns shapes and types that cross the boundary before this stage, for (B, T) tokens.

        Residual stream [B, T, D], v_first [B, T, D / tensor], statistics [L, S].
        """
        config = self.config
        tensor = self.topology.degrees.tensor
        parts: list[Part] = [((*tokens, config.hidden_size), dtype)]
        if self.v_first_arrives:
            # cut as heads are: each tensor rank sends those of its own to its peer
            parts.append(((*tokens, config.hidden_size // tensor), dtype))
        if config.moe is not None:
            statistics = (self.layers.start, num_statistics(config.moe))
            # counts of assignments, which bf16 would round beyond 256
            parts.append((statistics, torch.float32))
        return parts

    def _unpack(
        self, arrived: Tensor, tokens: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Splits the packed tensor into residual stream, v_first and statistics of layers before.

        v_first is None until an RWKV layer has computed it, statistics are None for a dense model.
        """
        parts = iter(exchange.unpack(arrived, self.arriving(tokens, arrived.dtype)))
        x = next(parts)
        v_first = next(parts) if self.v_first_arrives else None
        return x, v_first, next(parts, None)


class Pipeline(PipelineModule):
    """Stage of this rank in the form of DeepSpeed's pipeline engine."""

    def __init__(self, stage: PipelineStage) -> None:
        degrees = stage.topology.degrees
        grid = PipeModelDataParallelTopology(
            num_pp=degrees.pipeline, num_mp=degrees.tensor, num_dp=degrees.data
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it describes itself at length
            # PipelineModule takes one of these, its own stage's
            layers = [stage] * degrees.pipeline
            super().__init__(layers, topology=grid, partition_method="uniform")
        # after DeepSpeed's constructor, which resets these marks; it sets them for tied modules of
        # its own kind only, whose groups it makes itself (0.19.8, runtime/pipe/module.py)
        for parameter in stage.embedding.parameters() if stage.topology.is_last_stage else ():
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]  # counts once in the gradient norm
            mark_copy(parameter)

    @property
    def stage(self) -> PipelineStage:
        """Stage of this rank."""
        (stage,) = self.forward_funcs
        return cast(PipelineStage, stage)

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, torch.distributed.ProcessGroup]]:
        """Weights that two stages hold, with the group over which DeepSpeed sums gradients."""
        group = self.stage.topology.embedding_group
        return [] if group is None else [(self.stage.embedding.weight, group)]

    @torch.no_grad()
    def align_embeddings(self) -> None:
        """Copies the first stage's embedding to the last stage; after each step."""
        topology = self.stage.topology
        if topology.embedding_group is not None:
            # `src` is a global rank, also within a group
            torch.distributed.broadcast(
                self.stage.embedding.weight,
                src=topology.rank_at(0),
                group=topology.embedding_group,
            )


class StagedBackbone:
    """Backbone over all stages, without gradients; the ranks of a pipeline call it together.

    Results are complete on the last stage only, where losses are counted. Logits are the same on
    every rank, so that all go on with the same token.

    Args:
        stage: of this rank.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._topology = stage.topology
        self._weight = next(stage.parameters())
        self.config = stage.config
        self.device = self._weight.device
        self.train = stage.train
        self.eval = stage.eval
        if stage.topology.is_first_stage or stage.topology.is_last_stage:
            self.embedding = stage.embedding  # the tied head

    @property
    def training(self) -> bool:
        """True in training mode."""
        return self._stage.training

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        state: list[BlockState] | None = None,
        return_state: bool = False,
    ) -> Output:
        """Computes `Backbone.forward`; the output is complete on the last stage.

        On the others `hidden` is the residual stream after the stage, the statistics are those of
        all layers so far, and the state is that of the stage's blocks.
        """
        tokens = (input_ids.shape[0], input_ids.shape[1])
        arrived = input_ids
        if not self._topology.is_first_stage:
            # sizes are computed, not sent: both sides of a boundary know layers and tokens
            parts = self._stage.arriving(tokens, self._weight.dtype)
            arrived = self._weight.new_empty(exchange.num_elements(parts, self._weight.dtype))
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
        """Scores the next token, [..., D] -> [..., V], and broadcasts from the last stage."""
        last = self._topology.degrees.pipeline - 1
        if self._topology.is_last_stage:
            logits = self.embedding.logits(hidden)
        else:
            logits = hidden.new_empty(*hidden.shape[:-1], self.config.vocab_size)
        torch.distributed.broadcast(
            logits, src=self._topology.rank_at(last), group=self._topology.pipeline_group
        )
        return logits

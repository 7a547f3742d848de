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
"""

# B batch, T tokens of this sequence rank, D hidden, V vocabulary, R routers up to a stage boundary,
# S statistics in a row

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.models.backbone import Output, TokenEmbedding
from cdrmix.models.block import Block, rms_norm
from cdrmix.models.mtp import FurtherTokens
from cdrmix.models.recompute import Context, Statistics, run_blocks
from cdrmix.parallel import exchange
from cdrmix.parallel.exchange import Part
from cdrmix.parallel.tensor import mark_copy
from cdrmix.parallel.topology import Topology
from cdrmix.planning.blocks.block_type import is_v_first_made
from cdrmix.planning.blocks.routers import num_statistics, router_places
from cdrmix.planning.depth import DEPTH_STATISTICS
from cdrmix.planning.plan import Plan
from cdrmix.planning.stages import stage_layers
from cdrmix.runtime.phases import Phase, phase

runtime.import_deepspeed()  # first of all imports of it: chooses its accelerator and its ops

from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from deepspeed.runtime.pipe.module import PipelineModule  # noqa: E402
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # noqa: E402


class PipelineStage(nn.Module):
    """Layers of the backbone on one pipeline stage; parameters are named as in `Backbone`."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        topology: Topology,
        block: Callable[[ModelConfig, int], Block],
    ) -> None:
        super().__init__()
        model = config.model
        degrees = topology.degrees
        length = config.training.sequence_length
        self.config = model
        self.topology = topology
        self.layers = stage_layers(model, length, degrees.pipeline)[topology.stage]
        self.v_first_arrives = is_v_first_made(model, self.layers.start)
        before = range(self.layers.start)
        self.routers_before = len(router_places(model, before))
        self.routed_before = sum(layer in before for layer in model.routed_layers())
        # (B, T), fixed, because the flat tensor that arrives does not tell the shapes in it
        self.micro_batch = (plan.micro_batch_size, length // degrees.sequence)
        self.activation_checkpointing = plan.activation_checkpointing
        self.is_compiled = config.training.compile == "blocks"
        self.sequence_checkpoint_tokens = plan.sequence_checkpoint_tokens
        # Loss of the next micro-batch on the last stage; set for each step. It belongs to the
        # forward pass: DeepSpeed's bf16 optimizer clears gradients where the backward pass reaches
        # what forward gave (0.19.8, runtime/bf16_optimizer.py), and the head's would be among them.
        self.objective: Callable[[Output], Tensor] | None = None
        if topology.is_first_stage or topology.is_last_stage:
            self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size)
        if topology.is_first_stage:
            self.embedding_norm = rms_norm(model)
        self.blocks = nn.ModuleDict({str(layer): block(model, layer) for layer in self.layers})
        self.mtp: FurtherTokens | None = None
        if topology.is_last_stage:
            self.final_norm = rms_norm(model)
            if model.mtp is not None:  # beside the copy of the embedding, which its depths read
                self.mtp = FurtherTokens(
                    model,
                    block,
                    activation_checkpointing=plan.activation_checkpointing,
                    sequence_checkpoint_tokens=plan.sequence_checkpoint_tokens,
                )

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        """Runs a micro-batch of training through this stage.

        Takes what arrives, as of `advance`, then segment ids [B, T] if documents are apart. Gives
        the packed tensor for the next stage, with the same segment ids; on the last stage the loss.
        """
        # On their way beside the packed tensor, not in it: as integers they have no gradient, and
        # DeepSpeed sends none back for them (0.19.8, runtime/pipe/engine.py).
        arrived, *segment_ids = inputs
        ids = segment_ids[0] if segment_ids else None
        output, leaving = self.advance(arrived, self.micro_batch, segment_ids=ids)
        if leaving is not None:
            return leaving, *segment_ids
        assert self.objective is not None, "the step sets it"
        return self.objective(output)

    def advance(
        self, arrived: Tensor, tokens: tuple[int, int], **context: Unpack[Context]
    ) -> tuple[Output, Tensor | None]:
        """Runs this stage's blocks over `tokens`, (B, T).

        Takes input ids [B, T] on the first stage, elsewhere the packed tensor of the stage before.
        Gives the output up to this stage, whose hidden is normalised on the last stage only, and
        the packed tensor for the next stage, None on the last.
        """
        if self.topology.is_first_stage:
            x = self.embedding_norm(self.embedding(arrived))
            v_first = None
            earlier = Statistics(None, None)
        else:
            x, v_first, *earlier_parts = self._unpack(arrived, tokens)
            earlier = Statistics(*earlier_parts)
        x, v_first, here, after = run_blocks(
            self.blocks.values(),
            x,
            v_first,
            recompute=self.activation_checkpointing,
            sequence_checkpoint_tokens=self.sequence_checkpoint_tokens,
            is_compiled=self.is_compiled,
            **context,
        )
        # of all layers so far: the last stage needs them all, as it computes the routers' losses
        experts, depth = (_joined(*parts) for parts in zip(earlier, here, strict=True))
        if self.topology.is_last_stage:
            return Output(self.final_norm(x), experts, after, depth), None
        leaving = exchange.pack(
            *(part for part in (x, v_first, experts, depth) if part is not None)
        )
        return Output(x, experts, after, depth), leaving

    def arriving(self, tokens: tuple[int, int], dtype: torch.dtype) -> list[Part]:
        """Returns shapes and types that cross the boundary before this stage, for (B, T) tokens."""
        width = self.config.hidden_size
        parts: list[Part] = [((*tokens, width), dtype)]  # the residual stream
        if self.v_first_arrives:
            # cut as heads are: each tensor rank sends those of its own to its peer
            parts.append(((*tokens, width // self.topology.degrees.tensor), dtype))
        if self.routers_before:
            # counts of assignments, which bf16 would round beyond 256, [R, S]
            statistics = (self.routers_before, num_statistics(self.config))
            parts.append((statistics, torch.float32))
        if self.routed_before:
            parts.append(((self.routed_before, len(DEPTH_STATISTICS)), torch.float32))
        return parts

    def _unpack(
        self, arrived: Tensor, tokens: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Splits the packed tensor into residual stream, v_first and the statistics of experts and
        of routed blocks, if they cross."""
        parts = iter(exchange.unpack(arrived, self.arriving(tokens, arrived.dtype)))
        x = next(parts)
        v_first = next(parts) if self.v_first_arrives else None
        experts = next(parts) if self.routers_before else None
        return x, v_first, experts, next(parts, None)


def _joined(earlier: Tensor | None, here: Tensor | None) -> Tensor | None:
    """Rows of the layers before a stage, then those of its own."""
    parts = [part for part in (earlier, here) if part is not None]
    return torch.cat(parts) if parts else None


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
            weight = self.stage.embedding.weight
            source = topology.rank_at(0)
            torch.distributed.broadcast(weight, src=source, group=topology.embedding_group)


# Of DeepSpeed's instructions (0.19.8, runtime/pipe/schedule.py); what is sent and received between
# stages is waiting, and in no phase.
_PHASES: dict[str, Phase] = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceTiedGrads": "backward",
    "ReduceGrads": "backward",
    "OptimizerStep": "optimizer",
}


def name_phases(engine: PipelineEngine) -> None:
    """Has DeepSpeed's engine run its instructions in the phases that they belong to."""

    def within(name: Phase, method: Callable[..., None]) -> Callable[..., None]:
        def run(engine: PipelineEngine, **arguments: Any) -> None:
            with phase(name):
                method(engine, **arguments)

        return run

    engine._INSTRUCTION_MAP = {  # of this engine, in the place of the class's
        kind: within(_PHASES[kind.__name__], method) if kind.__name__ in _PHASES else method
        for kind, method in engine._INSTRUCTION_MAP.items()
    }


class StagedBackbone:
    """Backbone over all stages, without gradients; the ranks of a pipeline call it together.

    Results are complete on the last stage only, where losses are counted. Logits are the same on
    every rank, so that all go on with the same token.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._topology = stage.topology
        self._weight = next(stage.parameters())
        self.config = stage.config
        self.device = self._weight.device
        self.dtype = self._weight.dtype
        self.train = stage.train
        self.eval = stage.eval
        if stage.topology.is_first_stage or stage.topology.is_last_stage:
            self.embedding = stage.embedding  # the tied head

    @property
    def training(self) -> bool:
        """True in training mode."""
        return self._stage.training

    @property
    def num_routers(self) -> int:
        """Routers of all stages."""
        return len(router_places(self.config))

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **context: Unpack[Context]) -> Output:
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
        output, leaving = self._stage.advance(arrived, tokens, **context)
        if leaving is not None:
            torch.distributed.send(leaving, self._topology.rank_at(self._topology.stage + 1))
        return output

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the next token, [..., D] -> [..., V], and broadcasts from the last stage."""
        topology = self._topology
        if topology.is_last_stage:
            logits = self.embedding.logits(hidden)
        else:
            logits = hidden.new_empty(*hidden.shape[:-1], self.config.vocab_size)
        last = topology.rank_at(topology.degrees.pipeline - 1)
        torch.distributed.broadcast(logits, src=last, group=topology.pipeline_group)
        return logits

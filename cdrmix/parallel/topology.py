"""Place of a rank in the layout, and the groups in which it exchanges tensors.

world = pipeline x data x tensor, in DeepSpeed's order: rank = (stage * data + data rank) * tensor +
tensor rank. Sequence groups lie inside the data axis: data rank = sample rank * sequence +
sequence rank. Expert groups, which DeepSpeed makes, are consecutive ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from cdrmix import runtime
from cdrmix.planning.layout import Degrees


@dataclass(frozen=True)
class Topology:
    """Place of one rank in the layout, and its groups; None where it is alone in one."""

    degrees: Degrees
    rank: int  # in the world
    tensor_group: ProcessGroup | None = None  # shares out the matrices of the same tokens, layers
    sequence_group: ProcessGroup | None = None  # shares out the tokens of the same samples
    data_group: ProcessGroup | None = None  # holds the same parameters
    stage_group: ProcessGroup | None = None  # all ranks of this pipeline stage
    pipeline_group: ProcessGroup | None = None  # holds the stages for the same tokens, by stage
    embedding_group: ProcessGroup | None = None  # its first and last, with the tied embedding

    @property
    def tensor_rank(self) -> int:
        """Place among the ranks that share out matrices."""
        return self.rank % self.degrees.tensor

    @property
    def data_rank(self) -> int:
        """Place on the data axis, to which sequence ranks belong."""
        return self.rank // self.degrees.tensor % self.degrees.data

    @property
    def stage(self) -> int:
        """Pipeline stage, from 0 at the input."""
        return self.rank // (self.degrees.tensor * self.degrees.data)

    @property
    def sample_rank(self) -> int:
        """Place among the ranks that read samples of their own."""
        return self.data_rank // self.degrees.sequence

    @property
    def expert_rank(self) -> int:
        """Place among the consecutive ranks of a stage over which experts are spread."""
        return self.rank % self.degrees.stage_ranks % self.degrees.expert

    @property
    def is_first_stage(self) -> bool:
        """True where tokens are embedded."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the loss is computed."""
        return self.stage == self.degrees.pipeline - 1

    def rank_at(self, stage: int) -> int:
        """Global rank that holds another stage for the same tokens."""
        return self.rank + (stage - self.stage) * self.degrees.tensor * self.degrees.data

    @property
    def counts_tokens(self) -> bool:
        """True on the one rank that counts a token in sums over all ranks."""
        return self.is_last_stage and self.tensor_rank == 0


# One rank with everything, as outside a training run.
ALONE = Topology(Degrees(data=1, tensor=1, pipeline=1, sequence=1, expert=1), rank=0)


def make_topology(degrees: Degrees) -> Topology:
    """Makes the groups of a layout of as many ranks as the world has; collective over the world."""
    assert degrees.world_size == runtime.world_size(), "rules refuse another world"
    data = degrees.data
    tensor = degrees.tensor
    sequence = degrees.sequence
    world = degrees.world_size
    stage = data * tensor
    blocks = range(0, world, tensor * sequence)
    axes: dict[str, Iterator[range]] = {
        "tensor_group": (range(i, i + tensor) for i in range(0, world, tensor)),
        "sequence_group": (
            range(i + t, i + tensor * sequence, tensor) for i in blocks for t in range(tensor)
        ),
        # with sequence ranks in it: they hold the same parameters, so to DeepSpeed they are data
        # ranks, over which it averages gradients and spreads the optimizer
        "data_group": (
            range(i + t, i + stage, tensor) for i in range(0, world, stage) for t in range(tensor)
        ),
        "stage_group": (range(i, i + stage) for i in range(0, world, stage)),
        "pipeline_group": (range(i, world, stage) for i in range(stage)),
        # first and last stage; without stages the step would be 0, which `range` refuses
        "embedding_group": (range(i, world, (world - stage) or world) for i in range(stage)),
    }
    groups = {}
    for name, axis in axes.items():
        for ranks in axis:
            if len(ranks) == 1:
                continue
            # in one order on every rank, as each group is made by a collective over the world
            group = runtime.new_group(list(ranks))
            if runtime.rank() in ranks:
                groups[name] = group
    return Topology(degrees=degrees, rank=runtime.rank(), **groups)


def own_tokens(batch: dict[str, Tensor], topology: Topology) -> dict[str, Tensor]:
    """Cuts a batch of whole samples to the T / sequence tokens that this rank trains on.

    All tensors have T in the same dimension, the last of `input_ids`; labels are shifted already.
    `segment_ids` stay whole, as attention and recurrence reach beyond a rank's tokens.
    """
    parts = topology.degrees.sequence
    part = topology.data_rank % parts  # sequence ranks are the inner part of the data axis
    time = batch["input_ids"].dim() - 1  # `targets` have another dimension after it
    return {
        name: values if name == "segment_ids" else values.chunk(parts, dim=time)[part]
        for name, values in batch.items()
    }


class ModelParallelUnit:
    """Groups under the names by which DeepSpeed 0.19.8 asks for them, its argument `mpu`.

    Its pipeline engine builds its own grid and takes no mpu. Elsewhere DeepSpeed averages gradients
    and spreads the optimizer over the data group, and over the model group it sums the gradient
    norm and agrees on steps to skip. That is the tensor group here, or the stages of a frozen
    backbone, which are no stages to DeepSpeed.
    """

    def __init__(self, topology: Topology) -> None:
        degrees = topology.degrees
        assert (degrees.tensor > 1) != (degrees.pipeline > 1), "DeepSpeed knows one model axis"
        model_group = topology.tensor_group or topology.pipeline_group
        assert model_group is not None, "an axis of several ranks has a group"
        # DeepSpeed asks for a group of one too; each rank makes its own, so no order is needed
        self.data_group = topology.data_group or runtime.new_group(
            [topology.rank], is_made_alone=True
        )
        answers = {
            "get_data_parallel_group": self.data_group,
            "get_data_parallel_world_size": degrees.data,
            "get_data_parallel_rank": topology.data_rank,
            "get_model_parallel_group": model_group,
            "get_model_parallel_world_size": degrees.tensor * degrees.pipeline,
            # one of the two is always 0
            "get_model_parallel_rank": topology.tensor_rank + topology.stage,
            "get_tensor_model_parallel_world_size": degrees.tensor,
            "get_tensor_model_parallel_rank": topology.tensor_rank,
            # stages that DeepSpeed schedules: this one
            "get_pipeline_model_parallel_world_size": 1,
        }
        for question, answer in answers.items():
            setattr(self, question, lambda answer=answer: answer)

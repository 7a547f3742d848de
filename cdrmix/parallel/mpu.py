"""Process groups under the names by which DeepSpeed 0.19.8 asks for them."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from cdrmix import runtime
from cdrmix.parallel.topology import Topology


class ModelParallelUnit:
    """The `mpu` argument of `deepspeed.initialize`; its pipeline engine builds its own grid.

    DeepSpeed averages gradients and spreads the optimizer over the data group, and over the model
    group besides it sums the gradient norm and agrees on steps to skip. That is the tensor group
    here, or the stages of a frozen backbone, which are no stages to DeepSpeed.

    Args:
        topology: of this rank, with more than one tensor rank or else more than one stage.
    """

    def __init__(self, topology: Topology) -> None:
        degrees = topology.degrees
        assert (degrees.tensor > 1) != (degrees.pipeline > 1), "told of one of the two"
        group = topology.tensor_group or topology.pipeline_group
        assert group is not None, "an axis of several ranks has a group"
        self.topology, self.model_group = topology, group
        self.data_group = topology.data_group or runtime.new_group(
            [topology.rank], is_made_alone=True
        )

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks over which dense gradients are averaged; this one alone where there is no other."""
        return self.data_group

    def get_data_parallel_world_size(self) -> int:
        """Size of the data axis."""
        return self.topology.degrees.data

    def get_data_parallel_rank(self) -> int:
        """Place on the data axis."""
        return self.topology.data_rank

    def get_model_parallel_group(self) -> ProcessGroup:
        """Ranks that hold other parts of the model, for the same tokens."""
        return self.model_group

    def get_model_parallel_world_size(self) -> int:
        """Size of the model-parallel group."""
        return self.topology.degrees.tensor * self.topology.degrees.pipeline

    def get_model_parallel_rank(self) -> int:
        """This rank's place in the model-parallel group."""
        return self.topology.tensor_rank + self.topology.stage

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of the tensor axis."""
        return self.topology.degrees.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place on the tensor axis."""
        return self.topology.tensor_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of stages that DeepSpeed schedules: none but this one."""
        return 1

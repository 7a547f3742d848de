"""Our groups under the names by which DeepSpeed 0.19.8 asks for them."""

from __future__ import annotations

import torch.distributed
from torch.distributed import ProcessGroup

from cdrmix.parallel.topology import Topology


class ModelParallelUnit:
    """What `deepspeed.initialize` takes as `mpu`, without pipeline stages.

    DeepSpeed averages gradients and spreads the optimizer over the data group, and sums the
    gradient norm over the model group besides, which is the tensor group here.

    Args:
        topology: of this rank, with more than one tensor rank.
    """

    def __init__(self, topology: Topology) -> None:
        assert topology.tensor_group is not None, "without tensor ranks there is nothing to tell"
        assert topology.degrees.pipeline == 1, "the pipeline engine brings a grid of its own"
        self.topology, self.tensor_group = topology, topology.tensor_group
        self.data_group = topology.data_group or _group_of_one(topology.rank)

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks over which dense gradients are averaged; this one alone where there is no other."""
        return self.data_group

    def get_data_parallel_world_size(self) -> int:
        """Size of the data axis."""
        return self.topology.degrees.data

    def get_data_parallel_rank(self) -> int:
        """Place on the data axis."""
        return self.topology.data_rank

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Ranks that share out matrices."""
        return self.tensor_group

    def get_tensor_model_parallel_world_size(self) -> int:
        """How many they are."""
        return self.topology.degrees.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.topology.tensor_rank

    # the model group is stages and tensor ranks together; there is one stage
    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Pipeline stages."""
        return 1


def _group_of_one(rank: int) -> ProcessGroup:
    """A group that needs no other rank's help to be made."""
    return torch.distributed.new_group([rank], use_local_synchronization=True)

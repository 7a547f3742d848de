"""What a rank takes of a batch by its place in the layout."""

import torch

from cdrmix.parallel.topology import Topology, own_tokens
from cdrmix.planning.layout import Degrees


def test_sequence_ranks_share_out_tokens_with_all_targets_of_each() -> None:
    whole = {
        "input_ids": torch.arange(8).view(1, 1, 8),
        "targets": torch.arange(24).view(1, 1, 8, 3),
        "segment_ids": torch.zeros(1, 1, 8),
    }
    degrees = Degrees(data=2, tensor=1, pipeline=1, sequence=2, expert=1)
    part = own_tokens(whole, Topology(degrees=degrees, rank=1))
    assert part["input_ids"].tolist() == [[[4, 5, 6, 7]]]
    assert torch.equal(part["targets"], whole["targets"][:, :, 4:])
    assert torch.equal(part["segment_ids"], whole["segment_ids"])

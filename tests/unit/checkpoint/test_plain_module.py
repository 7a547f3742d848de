"""A checkpoint into a plain module; engines are in tests/distributed/test_checkpoint_state.py."""

from pathlib import Path

import pytest
import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.plain_module import load_module
from cdrmix.errors import StateError
from tests.checkpoints import save_checkpoint, whole


def test_a_plain_module_is_filled_from_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, target = (torch.nn.BatchNorm1d(4) for _ in range(2))
    torch.nn.init.normal_(source.weight)
    source.state_dict()["running_mean"].fill_(3)
    held = [whole(f"norm.{name}", p.detach()) for name, p in source.named_parameters()]
    held += [whole(f"norm.{name}", b, "buffer") for name, b in source.named_buffers()]
    save_checkpoint(tmp_path, 1, held, state={}, rank_state={}, keep=1)
    target.to(torch.bfloat16)
    with CheckpointFile(tmp_path / "1") as reader:
        load_module(target, reader, lambda name: f"norm.{name}")
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor.to(target.state_dict()[name].dtype))


def test_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    held = [whole("weight", torch.zeros(3, 2)), whole("scale", torch.zeros(3))]
    save_checkpoint(tmp_path, 1, held, state={}, rank_state={}, keep=1)
    with CheckpointFile(tmp_path / "1") as reader, pytest.raises(StateError) as caught:
        load_module(torch.nn.Linear(4, 3), reader)
    message = str(caught.value)
    assert "bias: not in the checkpoint" in message
    assert "scale: not in the model" in message
    assert "weight: (3, 2) in the checkpoint, (3, 4) in the model" in message

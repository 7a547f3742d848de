"""Working memory: exactness when fresh, slots that are carried, gated and bounded."""

import pytest
import torch

from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import MemoryConfig
from cdrmix.models.backbone import Backbone
from cdrmix.reasoning.working_memory import NUM_SLOTS, WorkingMemory

CONFIG = MemoryConfig(summary_dim=64, top_k=4, max_tokens=64)


def make() -> tuple[Backbone, WorkingMemory]:
    settings = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    backbone = Backbone(ModelConfig.model_validate({**settings, "transformer_fraction": 0.5}))
    backbone.initialize(seed=0)
    memory = WorkingMemory(64, CONFIG)
    memory.initialize(seed=0)
    return backbone, memory


def test_a_fresh_working_memory_changes_no_bit_of_the_backbone() -> None:
    backbone, memory = make()
    ids = torch.randint(256, (3, 20))
    alone = backbone(ids).hidden
    slots = memory.write(memory.start(3), alone)
    with memory.reading(backbone, slots):
        assert torch.equal(backbone(ids).hidden, alone)
    torch.nn.init.normal_(memory.up.weight)
    with memory.reading(backbone, slots):
        assert not torch.allclose(backbone(ids).hidden, alone)
    assert torch.equal(backbone(ids).hidden, alone)  # nothing stays behind


def test_slots_share_the_summary_and_stay_bounded() -> None:
    _, memory = make()
    slots = memory.start(2)
    assert slots.shape == (2, NUM_SLOTS, CONFIG.summary_dim // NUM_SLOTS)
    for _ in range(50):
        slots = memory.write(slots, 100 * torch.randn(2, 16, 64))
    assert slots.abs().max() <= 1


def test_writing_strides_in_two_calls_equals_writing_them_at_once() -> None:
    _, memory = make()
    hidden = torch.randn(3, 40, 64)
    at_once = memory.write(memory.start(3), hidden)
    in_two = memory.write(memory.write(memory.start(3), hidden[:, :24]), hidden[:, 24:])
    torch.testing.assert_close(at_once, in_two)


def test_a_gate_that_is_shut_keeps_the_slots_and_one_that_is_open_replaces_them() -> None:
    _, memory = make()
    with torch.no_grad():
        memory.gate.weight.zero_()
        memory.gate.bias.fill_(-50)
    slots = torch.randn(3, NUM_SLOTS, 8)
    torch.testing.assert_close(memory.write(slots, torch.randn(3, 8, 64)), slots)
    memory.gate.bias.data.fill_(50)
    hidden = torch.randn(3, 1, 64)  # one token: whatever a slot looks for, it finds that
    written = memory.write(slots, hidden)
    expected = torch.tanh(memory.value(hidden)).expand(3, NUM_SLOTS, 8)
    torch.testing.assert_close(written, expected)


def test_rows_do_not_mix() -> None:
    _, memory = make()
    torch.nn.init.normal_(memory.up.weight)
    slots, x = torch.randn(3, NUM_SLOTS, 8), torch.randn(3, 5, 64)
    alone = memory.read(memory.write(slots[1:2], x[1:2]), x[1:2])
    torch.testing.assert_close(memory.read(memory.write(slots, x), x)[1:2], alone)


def test_a_summary_that_slots_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match=f"summary_dim\n.*multiple of {NUM_SLOTS}"):
        MemoryConfig(summary_dim=100, top_k=4, max_tokens=64)


@torch.no_grad()
def test_filling_is_not_looked_at_and_a_stride_of_it_changes_nothing() -> None:
    _, memory = make()
    text = torch.randn(2, 11, 64)  # a stride of eight, and three tokens of the next
    filled = torch.cat([text, 100 * torch.randn(2, 13, 64)], dim=1)
    mask = torch.arange(24).expand(2, -1) < 11
    alone = memory.write(memory.start(2), text)
    torch.testing.assert_close(memory.write(memory.start(2), filled, mask), alone)
    # in one row text, in the other none: the rows do not share what they see
    mask = mask.clone()
    mask[1] = False
    slots = memory.write(memory.start(2), filled, mask)
    torch.testing.assert_close(slots[0], alone[0])
    assert torch.equal(slots[1], memory.start(2)[1])

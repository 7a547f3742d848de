"""Packed samples with documents apart, from the loader to the loss, against the documents alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.data.loader import Loader
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.training_step import MicroStep, micro_step
from cdrmix.evaluation.perplexity import evaluate
from cdrmix.models.backbone import Backbone
from cdrmix.objectives.language_model import linear_cross_entropy
from cdrmix.parallel.topology import ALONE
from tests.parity.test_backbone import small_model
from tests.unit.data.token_folder import write_token_folder

EOS, LENGTH = 0, 65
# Documents of 1 to 150 tokens: several in a sample, borders at its ends, one longer than it.
LENGTHS = (1, 2, 30, 64, 65, 150, 7, 7, 40, 3)
# At the usual scale of the embedding, logits near zero would hide what a token sees.
SHARP = 15.0


class Engine:
    """The backbone where a micro-step expects DeepSpeed's engine around it."""

    def __init__(self, module: Backbone) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Run:
    """All that a micro-step reads of a configuration."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    documents = [
        [*torch.randint(1, 300, (length - 1,), generator=generator).tolist(), EOS]
        for length in LENGTHS * 3
    ]
    dataset = TokenDataset(write_token_folder(tmp_path, {"train": documents}), "train", LENGTH)
    assert dataset.num_samples >= 16
    loader = Loader(
        dataset,
        global_batch_size=16,
        micro_batch_size=16,
        data_rank=0,
        data_size=1,
        seed=0,
        shuffle=True,
        segment_documents=True,
        prefetch=0,
    )
    return {name: values[0] for name, values in loader.next().items()}


def packed_step(model: Backbone, batch: dict[str, torch.Tensor]) -> MicroStep:
    config: Any = Run(model.config)
    return micro_step(Engine(model), config, ALONE, **batch, nats_scale=1.0)


def nats_alone(model: Backbone, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed cross-entropy of every piece of a document in the batch, each in a pass of its own."""
    total = torch.zeros(())
    for ids, last_label in zip(batch["input_ids"], batch["labels"][:, -1], strict=True):
        ends = [*((ids == EOS).nonzero().flatten() + 1).tolist()]
        for start, end in zip([0, *ends], [*ends, len(ids)], strict=True):
            piece = ids[start:end]
            if end == len(ids) and ids[-1] != EOS:  # goes on in the next sample
                piece = torch.cat([piece, last_label[None]])
            if len(piece) > 1:
                hidden = model(piece[None, :-1]).hidden
                weight = model.embedding.weight
                total = total + linear_cross_entropy(hidden, weight, piece[None, 1:])
    return total


@pytest.mark.parametrize("changes", [{}, {"moe": None}, {"transformer_fraction": 0.5}])
def test_a_packed_batch_is_worth_its_documents_one_by_one(
    changes: dict[str, Any], batch: dict[str, torch.Tensor]
) -> None:
    # Router losses are of the whole batch, whatever the documents: their weights are zero here.
    model = small_model(init_std_scale=SHARP, **changes)
    if model.config.moe is not None:
        moe = model.config.moe.model_copy(update={"load_balance_weight": 0.0, "z_loss_weight": 0.0})
        model.config = model.config.model_copy(update={"moe": moe})
    gradients = []
    alone = nats_alone(model, batch)
    packed = packed_step(model, batch)
    for loss in (alone, packed.loss):
        model.zero_grad()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    # Sums of float32 losses in another order; without segment_ids the sum is 2e-4 off.
    torch.testing.assert_close(packed.nats, alone.detach(), rtol=2e-6, atol=0)
    for one, other in zip(*gradients, strict=True):
        scale = float(one.abs().max())
        torch.testing.assert_close(other, one, rtol=0, atol=3e-5 * max(scale, 1e-3))


def test_documents_see_each_other_without_segment_ids(batch: dict[str, torch.Tensor]) -> None:
    model = small_model(init_std_scale=SHARP)
    apart = packed_step(model, batch).nats
    del batch["segment_ids"]
    assert (packed_step(model, batch).nats - apart).abs() > 1e-4 * apart


@torch.no_grad()
def test_documents_apart_are_evaluated_as_if_each_stood_alone(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    documents = [
        [*torch.randint(1, 300, (length - 1,), generator=generator).tolist(), EOS]
        for length in LENGTHS
    ]
    dataset = TokenDataset(
        write_token_folder(tmp_path, {"validation": documents}), "validation", 32
    )
    model = small_model(init_std_scale=SHARP)
    nats, predicted = 0.0, 0
    for row in torch.from_numpy(dataset.rows(np.arange(dataset.num_samples))).unbind():
        ends = (row[:-1] == EOS).nonzero().flatten() + 1
        for document in row.tensor_split(ends):
            if len(document) > 1:  # its first token follows nothing
                hidden = model(document[None, :-1]).hidden.double()
                scores = hidden[0] @ model.embedding.weight.double().T
                nats += F.cross_entropy(scores, document[1:], reduction="sum").item()
                predicted += len(document) - 1
    everything = {"max_tokens": 10**6, "batch_size": 3}
    apart = evaluate(model, dataset, **everything, segment_documents=True)
    assert apart.tokens == predicted < dataset.num_samples * 32
    assert apart.loss == pytest.approx(nats / predicted, rel=2e-6)
    assert apart.perplexity == pytest.approx(math.exp(nats / predicted), rel=1e-4)
    assert apart.bits_per_byte == pytest.approx(nats / predicted / math.log(2) / 3, rel=2e-6)
    together = evaluate(model, dataset, **everything)
    assert together.tokens == dataset.num_samples * 32
    assert abs(together.loss - apart.loss) > 1e-4 * apart.loss

"""Terms of the loss of a user's, against their means by hand."""

import pytest
import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.engines.combination import Combination, own_weights, weight_names
from cdrmix.engines.users_terms import own_counts
from cdrmix.errors import ConfigError
from cdrmix.models.backbone import TokenEmbedding

TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"
TERMS = (
    "objectives.plugins=[{use: tests.plugins:Length, weight: 0.5},"
    " {use: tests.plugins:Confidence, weight: 0.1, name: bold}]"
)


def batch() -> dict[str, torch.Tensor]:
    """Two micro-batches of unlike content, [2, 3, 5]."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (2, 3, 5), generator=source)
    labels = ids.roll(1, -1)
    labels[1, :, 1:] = -100
    return {"input_ids": ids, "labels": labels, "kinds": torch.zeros_like(ids, dtype=torch.uint8)}


def test_a_term_is_a_mean_over_the_global_batch() -> None:
    config = load_config(TINY, [TERMS])
    rows = batch()
    counts = dict(zip(weight_names(config), own_weights(rows, config), strict=True))
    is_even, is_valid = rows["input_ids"] % 2 == 0, rows["labels"] >= 0
    assert counts["term/Length"] == is_even.sum() and counts["term/bold"] == is_valid.sum() == 18
    combination = Combination(config, [*counts.values()], step=0)
    head = TokenEmbedding(50, 8)
    head.initialize(seed=0, std=1.0)
    hidden = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1))
    loss, totals = torch.zeros(()), torch.zeros(2)
    for number in range(2):
        micro_batch = {name: each[number] for name, each in rows.items()}
        terms = combination.terms(micro_batch, head)
        assert terms is not None
        part, sums = terms.losses(hidden[number])
        # The engine takes the mean over both.
        loss = loss + part * combination.nats_scale(2) / 2
        totals += sums
    length = hidden.square().mean(-1)[is_even].mean()
    scores = head.logits(hidden).gather(-1, rows["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    bold = scores.square()[is_valid].mean()
    torch.testing.assert_close(loss, 0.5 * length + 0.1 * bold)
    metrics = combination.metrics([0.0] * combination.num_sums, [], totals.tolist())
    assert metrics["objective/Length/loss"] == pytest.approx(length.item())
    assert metrics["objective/bold/loss"] == pytest.approx(bold.item())
    assert metrics["objective/total"] == pytest.approx(loss.item())


def test_one_of_which_a_step_has_none_is_left_out() -> None:
    config = load_config(TINY, [TERMS])
    rows = batch()
    rows["input_ids"] = rows["input_ids"] * 2 + 1
    combination = Combination(config, own_weights(rows, config), step=0)
    terms = combination.terms({name: each[0] for name, each in rows.items()}, TokenEmbedding(1, 8))
    assert terms is not None and terms.factors[0] == 0.0
    metrics = combination.metrics([0.0] * combination.num_sums, [], [0.0, 1.0])
    assert "objective/Length/loss" not in metrics and "objective/bold/loss" in metrics


@pytest.mark.parametrize(
    ("name", "told"), [("Owes", "counts [-1.0, -1.0]"), ("Scatters", "returns no scalar tensor")]
)
def test_what_is_no_mean_is_refused_by_name(name: str, told: str) -> None:
    config = load_config(TINY, [f"objectives.plugins=[{{use: tests.refused_plugins:{name}}}]"])
    rows = batch()
    with pytest.raises(ConfigError) as caught:
        own_counts(rows, config)
        weights = own_weights(rows, config)
        terms = Combination(config, weights, step=0).terms(rows, TokenEmbedding(1, 8))
        assert terms is not None
        terms.losses(torch.zeros(2, 3, 5, 8))
    assert told in str(caught.value) and f"tests.refused_plugins:{name}" in str(caught.value)

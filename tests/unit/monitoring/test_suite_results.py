"""Rows of suites: direction of their metrics."""

import pytest

from cdrmix.monitoring.suite_results import lower_is_better


@pytest.mark.parametrize(
    "metric",
    ["loss", "nats_per_token", "perplexity", "word_perplexity,none", "bits_per_byte"]
    + ["overflow_fraction", "brier_score", "ter", "truncated", "empty_share", "seconds"],
)
def test_losses_and_failures_are_better_lower(metric: str) -> None:
    assert lower_is_better(metric)


@pytest.mark.parametrize(
    "metric",
    ["acc", "acc_norm,none", "exact_match", "pass@10", "compile_rate", "routing_entropy_bits"]
    + ["tokens_per_second", "recall", "utilisation", "characters"],
)
def test_shares_of_what_is_right_are_better_higher(metric: str) -> None:
    assert not lower_is_better(metric)

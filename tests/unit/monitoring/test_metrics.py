from typing import Any

import numpy as np
import pytest
import torch

from cdrmix.monitoring.metrics import (
    METRICS,
    deterministic_part,
    member_name,
    member_of,
    record,
)


def test_a_record_stands_in_the_order_of_the_table_whatever_the_order_given():
    line = record(**{"moe/z_loss": 3.0}, grad_norm=0.5, loss=2.0, step=7)
    assert list(line) == ["step", "loss", "grad_norm", "moe/z_loss"]


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(ValueError, match="'gradnorm' is not a metric. Did you mean 'grad_norm'?"):
        record(step=1, gradnorm=0.5)


BY_DOMAIN = "eval/domain/*/loss"


def test_a_family_has_a_metric_for_each_domain():
    names = [member_name(BY_DOMAIN, domain) for domain in ("web", "code")]
    assert names == ["eval/domain/web/loss", "eval/domain/code/loss"]
    line = record(step=1, **dict.fromkeys(names, 2.0), **{"eval/loss": 3.0})
    assert list(line) == ["step", "eval/loss", *names]
    assert deterministic_part(line) == line
    with pytest.raises(ValueError, match="is not a metric. Did you mean 'eval/domain/"):
        record(step=1, **{"eval/domain/code/los": 2.0})


@pytest.mark.parametrize("domain", ["code", "a/b", "two words", "é", "*", "50%", ".."])
def test_a_domain_of_any_name_is_one_part_of_a_key_and_is_read_back(domain: str):
    name = member_name(BY_DOMAIN, domain)
    assert name.count("/") == BY_DOMAIN.count("/") and " " not in name
    assert record(step=1, **{name: 2.0})[name] == 2.0
    assert member_of(BY_DOMAIN, name) == domain
    assert member_of(BY_DOMAIN, "eval/loss") is None


def test_a_row_of_a_suite_has_a_key_of_four_parts():
    rows = "suite/*/*/*"
    name = member_name(rows, "zero-shot", "mmlu/law", "acc,none", safe=",:")
    assert name == "suite/zero-shot/mmlu%2Flaw/acc,none"
    assert member_of(rows, name) == "zero-shot"
    assert list(record(step=1, **{name: 0.5})) == ["step", name]
    assert member_of(rows, member_name("suite/*/failures", "code")) is None


def test_what_was_not_measured_is_left_out():
    assert record(step=1, loss=2.0, loss_scale=None) == {"step": 1, "loss": 2.0}


def test_numbers_of_any_library_become_plain_ones_with_their_full_precision():
    loss = torch.tensor(0.1, dtype=torch.float64)
    given: dict[str, Any] = {"step": np.int64(3), "loss": loss, "grad_norm": 1}
    line = record(**given)
    assert [type(value) for value in line.values()] == [int, float, int]
    assert line["loss"] == 0.1


def test_only_times_throughput_and_memory_differ_between_equal_runs():
    varying = {"tokens_per_second", "step_seconds", "memory_peak_bytes", "eval/seconds"}
    varying |= {"policy/retrieval_milliseconds", "cpt/seconds"}
    varying |= {"plugin/*/*", "hooks/*/seconds", "tracker/dropped"}
    line = record(step=1, **{metric.name: 1.0 for metric in METRICS if metric.name != "step"})
    varying |= {name for name in line if name.startswith("system/")}  # of a file of their own
    assert set(line) - set(deterministic_part(line)) == varying


def test_names_are_unique_and_a_sum_over_ranks_says_what_it_is_divided_by():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.denominator for metric in METRICS if metric.reduction == "sum")

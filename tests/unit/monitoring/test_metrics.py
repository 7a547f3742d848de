from typing import Any

import numpy as np
import pytest
import torch

from cdrmix.monitoring.metrics import METRICS, deterministic_part, record, take_memory_peak_bytes


def test_a_record_stands_in_the_order_of_the_table_whatever_the_order_given():
    line = record(**{"moe/z_loss": 3.0}, grad_norm=0.5, loss=2.0, step=7)
    assert list(line) == ["step", "loss", "grad_norm", "moe/z_loss"]


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(ValueError, match="'gradnorm' is not a metric. Did you mean 'grad_norm'?"):
        record(step=1, gradnorm=0.5)


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
    varying.add("policy/retrieval_milliseconds")
    line = record(step=1, **{metric.name: 1.0 for metric in METRICS if metric.name != "step"})
    assert set(line) - set(deterministic_part(line)) == varying


def test_names_are_unique_and_a_sum_over_ranks_says_what_it_is_divided_by():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.denominator for metric in METRICS if metric.reduction == "sum")


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="CUDA in use: the allocator's peak counts")
def test_memory_peak_is_in_bytes_and_that_since_the_line_before():
    take_memory_peak_bytes()
    before = take_memory_peak_bytes()
    peaks = []
    for mib in (128, 64, 0):  # the second spike lies below the first
        held = np.ones(mib * 2**20, dtype=np.uint8)
        del held
        peaks.append(take_memory_peak_bytes() - before)
    assert peaks == pytest.approx([2**27, 2**26, 0], abs=2**24)

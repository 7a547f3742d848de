"""The plan's bytes of each pipeline stage against what its rank holds while a step runs.

As tests/parity/test_memory.py: states to the byte, activations within 1 %.
"""

import pytest

from tools.benchmark.memory import Case
from tools.benchmark.stage_memory import STAGED_CASES, compare

TOLERANCE = 0.01


@pytest.mark.compiler  # without the C++ recurrence the chunked form's bound is all there is
@pytest.mark.parametrize("case", STAGED_CASES, ids=lambda case: case.name)
def test_predicted_bytes_are_what_each_stage_holds(case: Case) -> None:
    for stage, (predicted, measured) in enumerate(compare(case)):
        for part in ("weights", "gradients", "optimizer"):
            assert predicted[part] == measured[part], f"{part} of stage {stage}"
        deviation = predicted["activations"] / measured["activations"] - 1
        assert abs(deviation) < TOLERANCE, f"activations of stage {stage}: {deviation:.2%}"

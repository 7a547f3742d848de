"""Random states as JSON."""

import json
import random
from typing import Any

import numpy as np
import torch

from cdrmix.runtime.hardware import random_state, restore_random_state


def test_random_states_continue_after_a_trip_through_json() -> None:
    def draw() -> tuple[Any, ...]:
        numbers = np.random.standard_normal(3).tolist()
        return random.random(), random.gauss(0, 1), numbers, torch.randn(3).tolist()

    random.gauss(0, 1)  # leaves its second value for the next call
    np.random.standard_normal()
    state = json.loads(json.dumps(random_state()))
    first = draw()
    assert draw() != first
    restore_random_state(state)
    assert draw() == first

"""Muon learns a small byte model faster than AdamW, and its control without Newton-Schulz does not.

Rates are the best of three of each; all of them, and longer runs, are in `make bench ARGS=muon`.
"""

from cdrmix import runtime
from tests.harness import run_ranks
from tools.benchmark import muon

AHEAD = 0.10  # nats a byte


def losses() -> dict[str, float]:
    runtime.initialize_distributed()
    rates: dict[muon.Kind, float] = {"adamw": 4e-3, "muon": 2e-2, "normalised": 4e-3}
    found = {str(kind): muon.learn(kind, rate)["loss"] for kind, rate in rates.items()}
    runtime.destroy_distributed()
    return found


def test_muon_is_ahead_of_adamw_and_only_because_it_orthogonalises() -> None:
    (found,) = run_ranks(losses, 1, timeout=300)
    assert found["muon"] <= found["adamw"] - AHEAD
    assert found["normalised"] > found["adamw"] - AHEAD

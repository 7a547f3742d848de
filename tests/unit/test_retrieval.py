"""Retrieval learns what to look for; the long form is tools/benchmark/learn_retrieval.py."""

from tools.benchmark.learn_retrieval import learn


def test_trained_keys_are_found_among_distractors_and_raw_ones_are_not() -> None:
    found = learn(0, steps=150, num_distractors=2048)
    assert found["trained"] >= 0.95
    assert found["among distractors"] >= 0.90
    assert found["untrained"] <= 0.15
    assert found["raw"] <= 0.15

"""Held-out loss, n-gram baselines, trained runs as models."""

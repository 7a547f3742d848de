"""Held-out loss, n-gram baselines, and trained runs as plain models."""

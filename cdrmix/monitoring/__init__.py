"""Observation of a run: metrics, health, progress, goodput and the report."""

"""Trackers: copies of a run's metrics for TensorBoard, W&B, MLflow and others."""

from cdrmix.tracking.tracker import Line, TrackedRun, Tracker

__all__ = ["Line", "TrackedRun", "Tracker"]

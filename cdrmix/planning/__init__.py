"""Decides what a run looks like: sizes, layout, DeepSpeed profile. No torch, so that a login node
without a GPU can plan."""

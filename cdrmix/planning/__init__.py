"""Chooses sizes, layout and DeepSpeed profile of a run. No torch, so that a login node without a GPU
can plan."""

"""Chooses sizes, layout and DeepSpeed profile of a run, without torch: login nodes need no GPU."""

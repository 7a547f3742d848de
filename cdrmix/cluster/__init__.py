"""Starting, watching and restarting a run on the hosts of a cluster (no torch)."""

"""A rank that `cdrmix launch` or `cdrmix doctor` starts: becomes the script that it was handed."""

from cdrmix.cluster.handover import become_rank

become_rank()

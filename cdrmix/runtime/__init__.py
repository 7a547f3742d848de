"""Process group, device, seeds and environment of one rank.

Reads `os.environ` for the engines, and makes DeepSpeed's process group. Every function also works
in a plain single process, where the collectives are the identity.
"""

from cdrmix.network import free_port
from cdrmix.runtime.collectives import (
    all_gather_object,
    all_reduce_sum,
    barrier,
    broadcast_object,
    destroy_distributed,
    first_rank_does,
    have_met,
    import_deepspeed,
    initialize_distributed,
    new_group,
    rank,
    speaks_for_errors,
    together,
    world_size,
)
from cdrmix.runtime.description import describe_environment
from cdrmix.runtime.device import (
    device,
    device_memory_gib,
    host_memory_gib,
    keep_freed_memory,
    random_state,
    release_memory,
    restore_random_state,
    seed_everything,
    set_threads,
    use_cpu,
)
from cdrmix.runtime.environment import (
    cache_dir,
    end_with_launcher,
    environment_rank,
    environment_world_size,
    launch_folder,
    local_rank,
    local_world_size,
    map_environment,
    master_address,
    take_place,
    use_cpus_only,
)

__all__ = [
    "all_gather_object",
    "all_reduce_sum",
    "barrier",
    "broadcast_object",
    "cache_dir",
    "describe_environment",
    "destroy_distributed",
    "device",
    "device_memory_gib",
    "end_with_launcher",
    "environment_rank",
    "environment_world_size",
    "first_rank_does",
    "free_port",
    "have_met",
    "host_memory_gib",
    "import_deepspeed",
    "initialize_distributed",
    "keep_freed_memory",
    "launch_folder",
    "local_rank",
    "local_world_size",
    "map_environment",
    "master_address",
    "new_group",
    "random_state",
    "rank",
    "release_memory",
    "restore_random_state",
    "seed_everything",
    "set_threads",
    "speaks_for_errors",
    "take_place",
    "together",
    "use_cpu",
    "use_cpus_only",
    "world_size",
]

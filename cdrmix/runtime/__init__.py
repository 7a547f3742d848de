"""Process group, device, seeds and environment of one rank.

Reads `os.environ` for the engines, and makes DeepSpeed's process group. Every function also works
in a plain single process, where the collectives are the identity.

torch is imported with the first use of a name that needs it, which takes seconds: a start is
checked before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdrmix.network import free_port
from cdrmix.runtime.environment import (
    cache_dir,
    download_nothing,
    encode_on_one_core,
    end_with_launcher,
    environment_rank,
    environment_world_size,
    expand_segments,
    have_met,
    keep_graphs,
    launch_folder,
    local_rank,
    local_world_size,
    map_environment,
    master_address,
    quieten_tracer,
    speaks_for_errors,
    take_place,
    use_cpus_only,
)

if TYPE_CHECKING:
    from cdrmix.runtime.collectives import (
        all_gather_object,
        all_reduce_sum,
        barrier,
        broadcast_object,
        destroy_distributed,
        fails_everywhere,
        first_answer,
        first_rank_does,
        import_deepspeed,
        initialize_distributed,
        new_group,
        rank,
        share_timeout,
        together,
        world_size,
    )
    from cdrmix.runtime.hardware import (
        describe_environment,
        device,
        device_memory_gib,
        device_name,
        frozen_objects,
        host_memory_gib,
        keep_freed_memory,
        matmul_flops_per_second,
        random_state,
        release_memory,
        release_pinned_memory,
        resident_bytes,
        restore_random_state,
        seed_everything,
        set_threads,
        use_cpu,
    )

__all__ = [
    "all_gather_object",
    "all_reduce_sum",
    "barrier",
    "broadcast_object",
    "cache_dir",
    "describe_environment",
    "destroy_distributed",
    "download_nothing",
    "encode_on_one_core",
    "device",
    "device_memory_gib",
    "device_name",
    "end_with_launcher",
    "environment_rank",
    "environment_world_size",
    "expand_segments",
    "fails_everywhere",
    "first_answer",
    "first_rank_does",
    "free_port",
    "frozen_objects",
    "have_met",
    "host_memory_gib",
    "import_deepspeed",
    "initialize_distributed",
    "keep_freed_memory",
    "keep_graphs",
    "launch_folder",
    "local_rank",
    "local_world_size",
    "map_environment",
    "master_address",
    "matmul_flops_per_second",
    "new_group",
    "quieten_tracer",
    "random_state",
    "rank",
    "release_memory",
    "release_pinned_memory",
    "resident_bytes",
    "restore_random_state",
    "seed_everything",
    "set_threads",
    "share_timeout",
    "speaks_for_errors",
    "take_place",
    "together",
    "use_cpu",
    "use_cpus_only",
    "world_size",
]

_WITH_TORCH = ("cdrmix.runtime.collectives", "cdrmix.runtime.hardware")


def __getattr__(name: str) -> Any:
    """Imports what needs torch at its first use; Python calls this for names not yet here."""
    if name in __all__:
        for module in map(import_module, _WITH_TORCH):
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

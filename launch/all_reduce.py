"""Bandwidth of an all-reduce over all ranks, for `cdrmix doctor`; started like train.py.

deepspeed launch/all_reduce.py --bytes 100000000 --out FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from cdrmix import runtime
from cdrmix.cluster.handover import arguments_of
from cdrmix.errors import TrainingError
from cdrmix.monitoring.sinks import write_json_atomic

_ROUNDS = 3  # the first opens the connections; the best counts


def main(words: list[str]) -> int:
    """Time an all-reduce and check its sum; rank 0 writes a JSON object of the best round."""
    parser = argparse.ArgumentParser(description="Measure an all-reduce.")
    parser.add_argument("--bytes", type=int, default=100_000_000, help="size of the tensor")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments_of(words))
    try:
        _measure(args.bytes, args.out)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _measure(num_bytes: int, out: Path) -> None:
    runtime.map_environment()
    runtime.set_threads()
    runtime.initialize_distributed(timeout_minutes=2)  # `cdrmix doctor` is there to find hangs
    ranks = runtime.world_size()
    values = torch.ones(num_bytes // 4, device=runtime.device())
    seconds = []
    for _ in range(_ROUNDS):
        values.fill_(1.0)
        runtime.barrier()
        began = time.perf_counter()
        runtime.all_reduce_sum(values)
        total = float(values[-1])  # waits for the device, which runs behind
        seconds.append(time.perf_counter() - began)
        assert total == ranks, f"the sum over {ranks} ranks of 1 is {total}"
    if runtime.rank() == 0:
        best = min(seconds)
        # Bytes over each link: a ring sends every byte 2 (n - 1) / n times.
        bus = num_bytes * 2 * (ranks - 1) / ranks / best
        result = {"ranks": ranks, "bytes": num_bytes, "seconds": best}
        write_json_atomic(out, {**result, "bus_bytes_per_second": bus})
    runtime.destroy_distributed()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

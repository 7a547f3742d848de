"""Checkpoints of which each host has the part of its ranks, joined in the run directory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from cdrmix import runtime
from cdrmix.checkpoint import folder
from cdrmix.checkpoint.candidates import step_folders, step_of
from cdrmix.checkpoint.failed_writes import agree_on_failures, described
from cdrmix.checkpoint.files import NOT_A_MANIFEST, copy_file, read_json, read_manifest
from cdrmix.checkpoint.host_tiers import HostTier, check_own, ranks_of_host
from cdrmix.errors import InfrastructureError, StateError
from cdrmix.log import get_logger

logger = get_logger(__name__)


class _Part(NamedTuple):
    """Part of a checkpoint in a tier of a host."""

    holder: int  # rank that can read it
    folder: Path
    step: int
    number: int  # of the save
    world_size: int  # of the run that saved it
    ranks: frozenset[int]  # whose files it has


def join_newest(tiers: Sequence[HostTier], root: Path, *, newer_than: int) -> bool:
    """Joins the newest checkpoint in `root` that all hosts together hold, and that was saved after
    number `newer_than`; collective. A damaged or incomplete one is told and passed over.

    Returns True if there is one in `root` now.
    """
    leads = runtime.rank() == ranks_of_host()[0]
    of_ranks = runtime.all_gather_object(_parts_here(tiers) if leads else [])
    saves: dict[tuple[int, int, int], list[_Part]] = defaultdict(list)
    for part in sum(of_ranks, start=[]):
        if part.number > newer_than:
            saves[part.number, part.step, part.world_size].append(part)
    for (number, step, world_size), parts in sorted(saves.items(), reverse=True):
        missing = set(range(world_size)).difference(*(part.ranks for part in parts))
        try:
            if missing:
                raise StateError(f"the hosts of {len(missing)} of {world_size} ranks have no part")
            _join(root, parts, number, step, world_size)
        except (StateError, InfrastructureError) as error:
            if runtime.rank() == 0:
                logger.warning("skipped checkpoint %d in the tiers of the hosts: %s", step, error)
        else:
            return True
    return False


def _parts_here(tiers: Sequence[HostTier]) -> list[_Part]:
    """Parts in the tiers of this host, the fastest tier first; by the first rank there."""
    parts = []
    for tier in tiers:
        with suppress(FileNotFoundError):
            try:
                check_own(tier.folder)
                folders = step_folders(tier.folder)
            except (OSError, StateError) as error:
                logger.warning("warning: checkpoint.tiers.%s: %s", tier.name, error)
                continue
            parts += [part for each in folders if (part := _part_in(each)) is not None]
    return parts


def _part_in(checkpoint: Path) -> _Part | None:
    try:
        number, files = read_manifest(checkpoint)
        world_size = int(read_json(checkpoint / "state.json")["world_size"])
    except (OSError, InfrastructureError, *NOT_A_MANIFEST) as error:
        logger.warning("skipped checkpoint %s: %s", checkpoint, error)
        return None
    ranks = {int(name[5:].partition(".")[0]) for name in files if name.startswith("rank-")}
    step = step_of(checkpoint)
    return _Part(runtime.rank(), checkpoint, step, number, world_size, frozenset(ranks))


def _join(root: Path, parts: Sequence[_Part], number: int, step: int, world_size: int) -> None:
    """Copies the parts into `root`, compares their digests and names the whole; collective."""
    # By the first part that has a rank's files: several hosts may see the same disk.
    holders = {rank: part.holder for part in reversed(parts) for rank in part.ranks}
    token = runtime.broadcast_object(uuid4().hex[:8])
    temporary = root / f"{step}.tmp-{token}"
    agree_on_failures(lambda: folder.prepare(temporary, clears_leftovers=runtime.rank() == 0))

    def copy() -> None:
        for rank, holder in holders.items():
            if holder == runtime.rank():
                here = [each for each in parts if each.holder == holder and rank in each.ranks]
                _copy_first_good(here, rank, temporary)

    def complete() -> None:
        accounts = (temporary / f"rank-{rank:05d}.part" for rank in range(world_size))
        listed = [json.loads(account.read_text("utf-8")) for account in accounts]
        state = (temporary / "state.json").read_text("utf-8")
        folder.complete(temporary, listed, state, save=number)
        folder.publish(temporary, step)

    agree_on_failures(copy)
    is_first = runtime.rank() == 0
    agree_on_failures(lambda: complete() if is_first else None)
    if is_first:
        logger.info("joined checkpoint %d of the tiers of the hosts in %s", step, root)


def _copy_first_good(parts: Sequence[_Part], rank: int, temporary: Path) -> None:
    """Copies the files of one rank out of the first of the tiers in which they are whole."""
    *others, last = parts
    for part in others:
        try:
            _copy_rank(part.folder, rank, temporary)
        except (OSError, StateError) as error:
            logger.warning("skipped checkpoint %s: %s", part.folder, described(error))
        else:
            return
    _copy_rank(last.folder, rank, temporary)


def _copy_rank(part: Path, rank: int, temporary: Path) -> None:
    """Copies the files of one rank, and writes their account."""
    _, records = read_manifest(part)
    names = [name for name in records if name.startswith(f"rank-{rank:05d}.")]
    if rank == 0:  # alike in all parts
        copy_file(part / "state.json", temporary / "state.json", records["state.json"])
    for name in names:
        copy_file(part / name, temporary / name, records[name])
    index = [
        {"name": name, "kind": kind, "shape": whole["shape"], "dtype": whole["dtype"]}
        | {"fragment": fragment}
        for name, kinds in read_json(part / "index.json")["tensors"].items()
        for kind, whole in kinds.items()
        for fragment in whole["fragments"]
        if fragment["file"] in names
    ]
    folder.write_account(temporary, rank, {name: records[name] for name in names}, index)

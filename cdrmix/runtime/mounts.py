"""File systems of this host, by what is mounted where. No torch."""

from __future__ import annotations

from pathlib import Path

import psutil

# File systems between hosts: locks of SQLite cannot be relied on there, and reading takes network.
_BETWEEN_HOSTS = (
    *("afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "sshfs", "wekafs"),
)


def file_system(path: Path) -> str:
    """Returns the type of the file system that a path is, or would be, on; empty if unknown."""
    real = path.resolve()
    # The last of several mounts at one place hides the others.
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    kinds = (mounts[place] for place in (real, *real.parents) if place in mounts)
    return next(kinds, "").removeprefix("fuse.")


def is_between_hosts(path: Path) -> bool:
    """True on a file system that other hosts share."""
    return file_system(path) in _BETWEEN_HOSTS


def is_in_memory(path: Path) -> bool:
    """True if what is written to a path fills memory and no disk, such as /dev/shm."""
    return file_system(path) in ("tmpfs", "ramfs")

"""Landlock by system calls: files, ports and signals that a process may still reach.

Reads like a list of what is allowed; all else is refused with EACCES, for the process and all that
it starts, for good. Source of numbers and structures: linux/landlock.h and
Documentation/userspace-api/landlock.rst of the kernel.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_GIVE_VERSION = ctypes.c_uint32(1)
_RULE_BENEATH_PATH = 1
_SET_NO_NEW_PRIVILEGES = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHARACTER_DEVICE, _MAKE_SOCKET, _MAKE_BLOCK_DEVICE = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEVICE

# Rights of files that each version handles; the first one is of 13 bits.
_FIRST_RIGHTS = (1 << 13) - 1
_ADDED_RIGHTS = {2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEVICE}  # 2: moving between folders
_NETWORK_SINCE, _BIND_AND_CONNECT = 4, 0b11
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def landlock_version() -> int:
    """ABI version of the running kernel's Landlock; 0: it has none, or it is switched off."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GIVE_VERSION)))


def handled_rights(version: int) -> tuple[int, int, int]:
    """Bit masks of what is refused unless a rule allows it: files, network, scopes."""
    files = _FIRST_RIGHTS
    for since, right in _ADDED_RIGHTS.items():
        files |= right if version >= since else 0
    return (
        files,
        _BIND_AND_CONNECT if version >= _NETWORK_SINCE else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES_SINCE else 0,
    )


class Ruleset:
    """Rules for one or many processes, all with the same reach.

    Attributes:
        descriptor: of the ruleset; whoever has it can restrict itself.
    """

    def __init__(self, version: int) -> None:
        files, network, scopes = self._handled = handled_rights(version)
        # Older kernels refuse a structure with fields that they do not know.
        size = 24 if scopes else 16 if network else 8
        attributes = ctypes.create_string_buffer(struct.pack("=QQQ", files, network, scopes))
        self.descriptor = _checked(
            _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)),
            "landlock_create_ruleset",
        )

    def allow(self, paths: Iterable[str], rights: int) -> None:
        """Allows rights on files, and on folders with all below them.

        Paths that do not exist are left out: they cannot be read either.
        """
        for path in paths:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                is_folder = stat.S_ISDIR(os.fstat(place).st_mode)
                allowed = rights & self._handled[0] & (-1 if is_folder else _OF_FILES)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place))
                result = _libc.syscall(
                    _ADD_RULE, self.descriptor, _RULE_BENEATH_PATH, rule, ctypes.c_uint32(0)
                )
                _checked(result, f"landlock_add_rule for {path}")
            finally:
                os.close(place)

    def allow_own_folder(self, folder: str) -> None:
        """Allows all but programs, devices and sockets in a folder."""
        refused = (
            EXECUTE | _MAKE_CHARACTER_DEVICE | _MAKE_BLOCK_DEVICE | _MAKE_SOCKET | _IOCTL_DEVICE
        )
        self.allow([folder], self._handled[0] & ~refused)


def forbid_new_privileges() -> None:
    """Makes set-user-ID programs ordinary ones; asked for by Landlock and seccomp."""
    _checked(_libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")


def restrict_to(descriptor: int) -> None:
    """Restricts the calling thread, and all that it starts, to a ruleset, for good."""
    _checked(
        _libc.syscall(_RESTRICT_SELF, descriptor, ctypes.c_uint32(0)), "landlock_restrict_self"
    )

"""System calls that a sandboxed process may not make: a seccomp filter for x86-64.

Landlock restricts opening files. It says nothing of what takes a path without opening it (chmod,
utime), of other processes' priorities and limits, of memory that outlives a process, nor, before
its version 6, of signals. The filter refuses these for all, as it cannot read a path in memory.
Numbers are of asm/unistd_64.h, conditions on arguments compare the low 32 bits where the kernel
takes an int.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

ARCHITECTURE = "x86_64"
_AUDIT_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_FIRST_X32 = 0x40000000  # the same kernel entry with other numbers
# Linux 6.1 ends at 450. What later kernels added is refused unseen, as if it were not there.
_FIRST_UNKNOWN = 451

_NEW_PROCESSES = {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322}
_OTHER_PROCESSES = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440,
    "process_mrelease": 448, "kcmp": 312, "pidfd_open": 434, "pidfd_getfd": 438,
    "pidfd_send_signal": 424, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
    "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
    "sched_setaffinity": 203, "sched_setattr": 314, "ioprio_set": 251, "setrlimit": 160,
    "migrate_pages": 256, "move_pages": 279,
}  # fmt: skip
_NETWORK = {
    "socket": 41, "connect": 42, "accept": 43, "accept4": 288, "bind": 49, "listen": 50,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
}  # fmt: skip
_PATHS_BESIDE_LANDLOCK = {
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197,
    "lremovexattr": 198, "fremovexattr": 199, "truncate": 76, "inotify_init": 253,
    "inotify_init1": 294, "inotify_add_watch": 254, "fanotify_init": 300, "fanotify_mark": 301,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "mknod": 133, "mknodat": 259,
}  # fmt: skip
_MEMORY_BESIDE_ITS_LIMIT = {
    "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65,
    "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "mq_open": 240, "mq_unlink": 241, "mq_notify": 244, "memfd_create": 319,
    "memfd_secret": 447, "add_key": 248, "request_key": 249, "keyctl": 250,
}  # fmt: skip
_MACHINE = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "open_tree": 428,
    "mount_setattr": 442, "unshare": 272, "setns": 308, "bpf": 321, "perf_event_open": 298,
    "userfaultfd": 323, "seccomp": 317, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169,
    "swapon": 167, "swapoff": 168, "sethostname": 170, "setdomainname": 171,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305,
    "iopl": 172, "ioperm": 173, "acct": 163, "quotactl": 179, "quotactl_fd": 443,
    "syslog": 103, "vhangup": 153, "personality": 135, "uselib": 134, "nfsservctl": 180,
    "setuid": 105, "setgid": 106, "setreuid": 113, "setregid": 114, "setgroups": 116,
    "setresuid": 117, "setresgid": 119, "setfsuid": 122, "setfsgid": 123, "capset": 126,
}  # fmt: skip
REFUSED = {
    **_NEW_PROCESSES,
    **_OTHER_PROCESSES,
    **_NETWORK,
    **_PATHS_BESIDE_LANDLOCK,
    **_MEMORY_BESIDE_ITS_LIMIT,
    **_MACHINE,
}

# Refused by their arguments.
CONDITIONAL = {
    "clone": 56, "clone3": 435, "kill": 62, "tkill": 200, "tgkill": 234, "prlimit64": 302,
    "fcntl": 72, "ioctl": 16, "socketpair": 53,
}  # fmt: skip
_CLONE_THREAD = 0x00010000
_CLONE_NEW_NAMESPACES = 0x7E020000
# F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others when a descriptor is ready; leases; F_NOTIFY.
_REFUSED_FCNTL = (8, 10, 15, 1024, 1026)
# TIOCSTI, TIOCLINUX: typing into a terminal; FIOSETOWN, SIOCSPGRP: as F_SETOWN.
_REFUSED_IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)
_UNIX_FAMILY, _STREAM = 1, 1

# Of linux/filter.h and linux/seccomp.h.
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _WITH_ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _WITH_ERROR | errno.EPERM
_NOT_THERE = _WITH_ERROR | errno.ENOSYS
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_SET_SECCOMP, _MODE_FILTER = 22, 2
_SECCOMP, _IS_ACTION_AVAILABLE = 317, 2

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value
_libc = ctypes.CDLL(None, use_errno=True)


def _argument_at(index: int, *, high: bool = False) -> int:
    """Offset of an argument's low or high 32 bits in struct seccomp_data."""
    return 16 + 8 * index + 4 * high


def _for_call(name: str, *instructions: _Instruction) -> list[_Instruction]:
    """Instructions for one system call, which end in a return; jumped over by the others."""
    return [(_IF_EQUAL, 0, len(instructions), CONDITIONAL[name]), *instructions]


def _refuse_values(name: str, argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    tests = [(_IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return _for_call(
        name,
        (_LOAD, 0, 0, _argument_at(argument)),
        *tests,
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    )


def _conditions(own_process: int) -> list[_Instruction]:
    """Filter of the calls that are refused by their arguments."""
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)
    to_itself = ((_LOAD, 0, 0, _argument_at(0)), (_IF_EQUAL, 0, 1, own_process), allow, refuse)
    return [
        *_for_call(
            "clone",
            (_LOAD, 0, 0, _argument_at(0)),
            (_IF_BITS, 2, 0, _CLONE_NEW_NAMESPACES),
            (_IF_BITS, 0, 1, _CLONE_THREAD),
            allow,
            refuse,
        ),
        # Its flags are in memory, where a filter cannot look; libraries fall back on clone.
        *_for_call("clone3", (_RETURN, 0, 0, _NOT_THERE)),
        *_for_call("kill", *to_itself),
        *_for_call("tkill", *to_itself),
        *_for_call("tgkill", *to_itself),
        # Its own limits may be read: a process of 0 and no new limit.
        *_for_call(
            "prlimit64",
            (_LOAD, 0, 0, _argument_at(0)),
            (_IF_EQUAL, 0, 5, 0),
            (_LOAD, 0, 0, _argument_at(2)),
            (_IF_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, _argument_at(2, high=True)),
            (_IF_EQUAL, 0, 1, 0),
            allow,
            refuse,
        ),
        *_refuse_values("fcntl", 1, _REFUSED_FCNTL),
        *_refuse_values("ioctl", 1, _REFUSED_IOCTL),
        # asyncio needs a pair of stream sockets. Those of datagrams could write to any address.
        *_for_call(
            "socketpair",
            (_LOAD, 0, 0, _argument_at(0)),
            (_IF_EQUAL, 0, 4, _UNIX_FAMILY),
            (_LOAD, 0, 0, _argument_at(1)),
            (_AND, 0, 0, 0xF),
            (_IF_EQUAL, 0, 1, _STREAM),
            allow,
            refuse,
        ),
    ]


def filter_of(own_process: int) -> list[_Instruction]:
    """Instructions of the filter.

    Args:
        own_process: id of the process, to which alone it may send signals.
    """
    refused = sorted(REFUSED.values())
    return [
        # Numbers mean other calls on other architectures, so this comes first.
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURE),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _FIRST_X32),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_IF_AT_LEAST, 0, 1, _FIRST_UNKNOWN),
        (_RETURN, 0, 0, _NOT_THERE),
        *_conditions(own_process),
        *((_IF_EQUAL, len(refused) - place, 0, number) for place, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


def has_seccomp() -> bool:
    """True if the kernel knows filters that end a process."""
    action = ctypes.c_uint32(_KILL_PROCESS)
    return bool(_libc.syscall(_SECCOMP, _IS_ACTION_AVAILABLE, 0, ctypes.byref(action)) == 0)


def install_filter() -> None:
    """Puts the filter on the calling thread and all that it starts, for good.

    Raises:
        OSError: the kernel refuses; no_new_privs has to be set before.
    """
    instructions = filter_of(os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    if _libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")

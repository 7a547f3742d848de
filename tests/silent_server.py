"""A file server that stands still: calls on a folder that do not return while a flag is there.

The calls of a program are held up in its C library (LD_PRELOAD), as a hard NFS mount holds them up
in the kernel; the program itself is the real one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void hold_up(const char *path) {
    const char *folder = getenv("SILENT_FOLDER"), *flag = getenv("SILENT_FLAG");
    if (!folder || !flag || !path || strncmp(path, folder, strlen(folder)))
        return;
    while (syscall(SYS_access, flag, F_OK) == 0)
        usleep(20000);
}

#define HOLD_UP(result, name, at, parameters, arguments)            \
    result name parameters {                                        \
        result(*real) parameters = dlsym(RTLD_NEXT, #name);         \
        hold_up(at);                                                \
        return real arguments;                                      \
    }

HOLD_UP(void *, opendir, path, (const char *path), (path))
HOLD_UP(int, open, path, (const char *path, int flags, unsigned mode), (path, flags, mode))
HOLD_UP(int, open64, path, (const char *path, int flags, unsigned mode), (path, flags, mode))
HOLD_UP(int, stat, path, (const char *path, void *to), (path, to))
HOLD_UP(int, stat64, path, (const char *path, void *to), (path, to))
HOLD_UP(int, fstatat, path, (int at, const char *path, void *to, int flags), (at, path, to, flags))
HOLD_UP(int, fstatat64, path, (int at, const char *path, void *to, int flags),
        (at, path, to, flags))
HOLD_UP(int, utimensat, path, (int at, const char *path, const void *times, int flags),
        (at, path, times, flags))
HOLD_UP(int, rename, from, (const char *from, const char *to), (from, to))
"""


def silent_server(folder: Path, flag: Path, *, build: Path) -> dict[str, str]:
    """Environment of programs that find `folder` on a server that is silent while `flag` exists.

    Args:
        folder: absolute path.
        flag: file elsewhere.
        build: folder for the library.
    """
    source, library = build / "silent_server.c", build / "silent_server.so"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {
        "LD_PRELOAD": str(library),
        "SILENT_FOLDER": str(folder),
        "SILENT_FLAG": str(flag),
    }

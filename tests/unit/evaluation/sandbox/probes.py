"""Programs that try what they must not, each with what it ends with, guarded and without a guard.

`reached` is true where a program got what it wanted, so a probe that passes has left the sandbox.
"""

import sys
from dataclasses import dataclass

SHARED = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CHECKED = (
    "def checked(result):\n"
    "    if result < 0:\n"
    "        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
    "    return True\n"
)
REFUSED = "error PermissionError"


@dataclass(frozen=True)
class Probe:
    """A program and its verdicts.

    Attributes:
        source: may name {secret}, a readable and writable file of this process; {process}, this
            process; {abstract}, a socket that it listens at.
        verdict: kind and error, guarded.
        without: guards that are left out in the control, in which it passes; (): no control, as
            without them it would harm, or no guard is what stops it.
        may_lack: the machine may refuse it by itself, as containers do.
    """

    source: str
    verdict: str = REFUSED
    without: tuple[str, ...] = ("landlock",)
    may_lack: bool = False


def system_call(*arguments: object) -> str:
    """Program that makes a system call."""
    return f"reached = checked(libc.syscall({', '.join(map(str, arguments))}))"


LANDLOCK, SECCOMP, BOTH = ("landlock",), ("seccomp",), ("landlock", "seccomp")
LIMITS = ("limits",)

FILES = {
    "read a system file": Probe("reached = open('/etc/passwd').read()"),
    "read a file of the user": Probe("reached = open({secret!r}).read()"),
    "list the root": Probe("reached = os.listdir('/')"),
    "environment of another process": Probe(
        "reached = open('/proc/{process}/environ').read()", without=("landlock", "capabilities")
    ),
    "memory map of another process": Probe(
        "reached = open('/proc/{process}/maps').read()", without=("landlock", "capabilities")
    ),
    "descriptors of another process": Probe("reached = os.listdir('/proc/{process}/fd')"),
    "own command line": Probe("reached = open('/proc/self/cmdline').read()"),
    "pipe of the zygote": Probe(
        "reached = open(f'/proc/{{os.getppid()}}/fd/100', 'rb')", without=()
    ),
    "memory of the zygote": Probe(
        "reached = open(f'/proc/{{os.getppid()}}/mem', 'r+b')", without=()
    ),
    "symbolic link": Probe("os.symlink({secret!r}, 's'); reached = open('s').read()"),
    "race of symbolic links": Probe(
        "import threading, time\n"
        "open('plain', 'w').write('plain')\n"
        "reached, until = False, 0.3  # of processor time, which a crowded machine gives too\n"
        "def swap():\n"
        "    turn = 0\n"
        "    while time.process_time() < until:\n"
        "        turn += 1\n"
        "        os.symlink('plain' if turn % 2 else {secret!r}, 'new')\n"
        "        os.rename('new', 'link')\n"
        "threading.Thread(target=swap).start()\n"
        "while time.process_time() < until and not reached:\n"
        "    try:\n"
        "        reached = open('link').read() == 'secret'\n"
        "    except OSError:\n"
        "        pass\n",
        "wrong AssertionError",
    ),
    "hard link": Probe(
        "os.link({secret!r}, 'l'); reached = open('l').read()",
        "error OSError",  # EXDEV: as if it were another disk
        may_lack=True,  # the folders may be on different disks
    ),
    "move a file in": Probe(
        "os.rename({secret!r}, 'm'); os.rename('m', {secret!r}); reached = True",
        may_lack=True,
    ),
    "write outside": Probe("reached = open({secret!r}, 'a').write('')  == 0"),
    "make a file outside": Probe(
        "place = {secret!r} + '.new'; open(place, 'w').close(); os.unlink(place); reached = True"
    ),
    "shared memory folder": Probe(
        "place = '/dev/shm/cdrmix-probe-{process}'\n"
        "open(place, 'w').close(); os.unlink(place); reached = True"
    ),
    "remove outside": Probe(
        "os.unlink({secret!r}); open({secret!r}, 'w').write('secret'); reached = 1"
    ),
    "program of the system": Probe("os.execv('/bin/true', ['true'])", without=()),
    "sources of this package": Probe("import cdrmix", "error ModuleNotFoundError", without=()),
    "installed packages": Probe("import numpy", "error ModuleNotFoundError", without=()),
    "file of an installed package": Probe("reached = open({numpy!r}).read()"),
}

PATHS_BESIDE_LANDLOCK = {
    "change a mode": Probe("os.chmod({secret!r}, 0o600); reached = True", without=SECCOMP),
    "change a mode, newer call": Probe(
        system_call(452, -100, "{secret!r}.encode()", 0o600, 0), "error OSError", SECCOMP, True
    ),
    "change an owner": Probe("os.chown({secret!r}, -1, -1); reached = True", without=SECCOMP),
    "change times": Probe("os.utime({secret!r}); reached = True", without=SECCOMP),
    "shorten a file": Probe("os.truncate({secret!r}, 6); reached = True", without=BOTH),
    "attributes": Probe(
        "os.setxattr({secret!r}, 'user.probe', b'1'); reached = True", without=SECCOMP,
        may_lack=True,
    ),
    "watch folders": Probe(
        "fd = libc.inotify_init1(0); checked(fd)\n"
        "reached = checked(libc.inotify_add_watch(fd, b'/', 0x100))",
        without=SECCOMP,
    ),
}  # fmt: skip

PROCESSES = {
    "fork": Probe(
        "process = os.fork()\nif not process: os._exit(0)\nreached = os.waitpid(process, 0)",
        without=SECCOMP,
    ),
    "fork in a thread": Probe(
        "import threading\n"
        "reached, errors = [], []\n"
        "def fork():\n"
        "    try:\n"
        "        process = os.fork()\n"
        "        if not process: os._exit(0)\n"
        "        reached.append(os.waitpid(process, 0))\n"
        "    except OSError as error:\n"
        "        errors.append(error)\n"
        "thread = threading.Thread(target=fork); thread.start(); thread.join()\n"
        "if errors: raise errors[0]",
        without=SECCOMP,
    ),
    "subprocess": Probe(
        "import subprocess; reached = subprocess.run(['/bin/true']).returncode == 0", without=BOTH
    ),
    "os.system": Probe("reached = os.system('true') == 0", "wrong AssertionError", BOTH),
    "multiprocessing": Probe(
        "import multiprocessing\n"
        "process = multiprocessing.get_context('fork').Process(target=print)\n"
        "process.start(); process.join(); reached = True",
        without=SECCOMP,
    ),
    "a program in memory": Probe(
        "fd = os.memfd_create('p'); os.write(fd, b'#!/bin/true'); reached = True", without=SECCOMP
    ),
    "execveat": Probe(
        "name = b'/bin/true'; arguments = (ctypes.c_char_p * 2)(name, None)\n"
        + system_call(322, -100, "name", "arguments", "None", 0),
        without=(),
    ),
    "signal to the parent": Probe("os.kill(os.getppid(), 0); reached = True", without=BOTH),
    "signal to another process": Probe("os.kill({process}, 0); reached = True", without=BOTH),
    "signal to the parent's group": Probe(
        "os.killpg(os.getpgid(os.getppid()), 0); reached = True", without=BOTH
    ),
    "signal to all": Probe("os.kill(-1, 0); reached = True", without=BOTH),
    "signal to a thread of another": Probe(
        system_call(234, "{process}", "{process}", 0), without=BOTH
    ),
    "queued signal": Probe(system_call(129, "{process}", 0, "b'\\0' * 128"), without=()),
    "signal when a pipe is ready": Probe(
        "import fcntl; reader, _ = os.pipe()\n"
        "fcntl.fcntl(reader, 8, {process}); reached = fcntl.fcntl(reader, 9) == {process}",
        without=SECCOMP,
    ),
    "signal by a descriptor of a process": Probe(
        "reached = os.pidfd_open({process}) > 0", without=SECCOMP
    ),
    "ptrace": Probe(
        "reached = checked(libc.ptrace(0, 0, 0, 0))", without=SECCOMP, may_lack=True
    ),
    "memory of another process": Probe(
        "vector = (ctypes.c_ulong * 2)(0, 0)\n"
        + system_call(310, "{process}", "vector", 0, "vector", 0, 0),
        without=BOTH,
    ),
    "limits of another process": Probe(
        "import resource; resource.prlimit({process}, resource.RLIMIT_CORE); reached = True",
        without=SECCOMP,
    ),
    "priority of another process": Probe(
        "os.setpriority(os.PRIO_PROCESS, {process}, os.getpriority(os.PRIO_PROCESS, {process}))\n"
        "reached = True",
        without=("seccomp", "capabilities"),
        may_lack=True,
    ),
    "cores of another process": Probe(
        "os.sched_setaffinity({process}, os.sched_getaffinity({process})); reached = True",
        without=("seccomp", "capabilities"),
    ),
    "own limits": Probe(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))\n"
        "reached = True",
        "error ValueError",
        without=SECCOMP,
    ),
}  # fmt: skip

NETWORK_AND_KERNEL = {
    "socket": Probe("import socket; reached = socket.socket()", without=SECCOMP),
    "abstract socket": Probe(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}'); reached = s",
        without=BOTH,
    ),
    "abstract socket, by Landlock alone": Probe(
        "import socket; s = socket.socketpair(type=socket.SOCK_DGRAM)[0]\n"
        "reached = s.sendto(b'x', '\\0{abstract}-datagrams')",
        without=BOTH,
    ),
    "io_uring": Probe(
        "reached = checked(libc.syscall(425, 4, ctypes.create_string_buffer(120)))",
        without=("seccomp", "limits"), may_lack=True,
    ),
    "user namespace": Probe(
        "reached = checked(libc.unshare(0x10000000))", without=SECCOMP, may_lack=True
    ),
    "chroot": Probe(
        "os.chroot('.'); reached = True", without=(*BOTH, "capabilities"), may_lack=True
    ),
    "mount": Probe("reached = checked(libc.mount(b'x', b'.', b'tmpfs', 0, 0))", without=()),
    "memory that outlives it": Probe(
        "place = libc.shmget(0, 4096, 0o600); checked(place)\n"
        "reached = checked(libc.shmctl(place, 0, 0))",
        without=SECCOMP,
    ),
    "message queue": Probe(
        "place = libc.msgget(0, 0o600); checked(place)\n"
        "reached = checked(libc.msgctl(place, 0, 0))",
        without=SECCOMP,
    ),
    "bpf": Probe(
        "code = ctypes.create_string_buffer(120)\n"
        "reached = checked(libc.syscall(321, 0, code, 120))",
        without=(),
    ),
    "keyring": Probe(system_call(250, 0, -3, 1), without=SECCOMP, may_lack=True),
    "newer system call": Probe(
        "number = 451; libc.syscall(number, -1, 0, 0, 0); reached = ctypes.get_errno() != 38",
        "wrong AssertionError", SECCOMP, True,  # cachestat, of Linux 6.5
    ),
    "numbers of x32": Probe(
        "libc.syscall(0x40000000 + 39); reached = True", "killed SIGSYS", SECCOMP
    ),
    "calls of 32 bits": Probe(
        "import mmap\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('53b814000000cd805bc3'))  # getpid by int 0x80\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "reached = ctypes.CFUNCTYPE(ctypes.c_int)(start)() == os.getpid()",
        "killed SIGSYS", SECCOMP, True,
    ),
}  # fmt: skip

RESOURCES = {
    "busy loop": Probe("while True: pass", "timeout_cpu", without=()),
    "busy loop that catches the signal": Probe(
        "import signal, time; signal.signal(signal.SIGXCPU, lambda *_: None)\n"
        "while time.process_time() < 1.2: pass\nreached = True",
        "timeout_cpu", (),
    ),
    "memory": Probe("reached = bytearray(2 << 30)", "memory MemoryError", ()),
    "address space": Probe(
        "import mmap; reached = mmap.mmap(-1, 2 << 30)", "error OSError", LIMITS
    ),
    "memory bit by bit": Probe(
        "parts = []\nwhile True: parts.append(bytes(1 << 24))", "memory MemoryError", ()
    ),
    "large file": Probe(
        "f = open('b', 'wb'); reached = f.write(b'0' * (2 << 20)); f.flush()",
        "error OSError", LIMITS,
    ),
    "large file, behind its end": Probe(
        "f = open('b', 'wb'); f.truncate(2 << 20); reached = True", "error OSError", LIMITS
    ),
    "many descriptors": Probe(
        "reached = [os.dup(1) for _ in range(40)]", "error OSError", LIMITS
    ),
    "deep recursion": Probe("def f(): f()\nf()", "error RecursionError", ()),
    "sleep": Probe("import time; time.sleep(60)", "timeout_wall", ()),
    "stopped": Probe(
        "import signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout_wall", ()
    ),
    "many files": Probe(
        "for n in range(1000000): open(str(n), 'w').close()\nreached = True", "killed folder", ()
    ),
    "many bytes in files": Probe(
        "import time\nfor n in range(20): open(str(n), 'wb').write(bytes(1 << 20))\n"
        "time.sleep(60)", "killed folder", (),
    ),
    "many threads": Probe(
        "import threading, time; threading.stack_size(1 << 15)\n"
        "for n in range(100): threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "time.sleep(60)",
        "killed threads", (),
    ),
    "huge output": Probe(
        "text = 'x' * (1 << 20)\nfor n in range(200): print(text); print(text, file=sys.stderr)\n"
        "raise KeyError", "error KeyError", (),
    ),
    "huge output to the report": Probe(
        "while True: os.write(3, bytes(1 << 20))", "killed output", ()
    ),
}  # fmt: skip

JUDGE = {
    "os._exit": Probe("os._exit(0)", "escaped_exit", ()),
    "sys.exit": Probe("sys.exit(0)", "escaped_exit SystemExit", ()),
    "raise SystemExit at a comparison": Probe(
        "class Any:\n    def __bool__(self): raise SystemExit\nreached = Any()",
        "escaped_exit SystemExit", (),
    ),
    "unicode identifiers": Probe("\uff4f\uff53._exit(0)", "escaped_exit", ()),
    "killed by itself": Probe("os.kill(os.getpid(), 9)", "killed SIGKILL", ()),
    "replaced process": Probe("libc.raise_ = None; libc._exit(0)", "escaped_exit", ()),
    "the token everywhere": Probe(
        "for fd in range(3, 200):\n"
        "    line = b'{{\"kind\": \"done\"}}\\n'\n"
        "    for text in (b'P', line, b'0' * 32 + line):\n"
        "        try: os.write(fd, text)\n"
        "        except OSError: pass\n"
        "os._exit(0)",
        "escaped_exit", (),
    ),
    "inherited descriptors": Probe(
        "reached = []\n"
        "for fd in range(4, 2000):\n"
        "    try: reached.append(os.fstat(fd))\n"
        "    except OSError: pass",
        "wrong AssertionError", (),
    ),
    "inherited descriptors, planted": Probe(
        "fd = os.dup(1); reached = [os.fstat(n) for n in range(4, 6) if n == fd]", "passed", ()
    ),
    "arguments and environment": Probe(
        "reached = any(name.startswith('CDRMIX') or name in ('HOME', 'USER', 'PATH')\n"
        "              for name in os.environ) or sys.argv[1:]",
        "wrong AssertionError", (),
    ),
    "modules replaced": Probe(
        "import builtins, json\n"
        "for name in ('compile', 'exec', 'eval'): setattr(builtins, name, lambda *a, **k: None)\n"
        "class Wrong(Exception): pass\n"
        "builtins.AssertionError = Wrong\n"
        "os._exit = os.write = json.JSONEncoder.encode = lambda *a: 0\n"
        "sys.modules.clear(); reached = False",
        "error AssertionError", (),  # the name means another class then
    ),
    "import hook": Probe(
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None): os._exit(0)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.path_hooks.insert(0, lambda path: os._exit(0)); sys.path_importer_cache.clear()\n"
        "reached = False",
        "wrong AssertionError", (),
    ),
    "what is done at the end": Probe(
        "import atexit; atexit.register(os._exit, 0); reached = False", "wrong AssertionError", ()
    ),
    "exception with methods": Probe(
        "class Odd(Exception):\n    def __str__(self): os.abort()\n"
        "class Meta(type):\n    __name__ = property(lambda self: os.abort())\n"
        "class Error(Exception, metaclass=Meta): pass\nraise Error('\\x1b[31m red\\nsecond line')",
        "error Error", (),
    ),
}  # fmt: skip

# Python 3.11.2 raises the one, 3.11.7 the other.
_OF_A_NULL_BYTE = "SyntaxError" if sys.version_info >= (3, 11, 4) else "ValueError"
NOT_COMPILED = {
    "a syntax error": ("def f(:", "SyntaxError"),
    "a null byte": ("x = 1\0", _OF_A_NULL_BYTE),
    "a lone surrogate": ("x = '\udc80'", "UnicodeEncodeError"),
    "deep nesting": ("x = " + "(" * 5000 + ")" * 5000, ""),
    "long operators": ("x = " + "-" * 100_000 + "1", ""),
    "an indentation": ("  def f(): pass\n pass", "IndentationError"),
}

RIGHT = {
    "computed": "assert sum(range(10)) == 45",
    "threads": (
        "import threading\nfound = []\n"
        "threads = [threading.Thread(target=found.append, args=(n,)) for n in range(20)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; assert len(found) == 20"
    ),
    "a busy thread is left": "import threading\n"
    "def spin():\n    while True: pass\nthreading.Thread(target=spin).start()",
    "own folder": (
        "import os\nassert os.listdir() == []\nopen('a', 'w').write('x'); os.mkdir('d')\n"
        "os.rename('a', 'd/a'); assert open('d/a').read() == 'x'\n"
        "import tempfile; tempfile.TemporaryFile().write(b'x')\n"
        "os.symlink('/', 'root'); os.mkdir('closed', 0)"
    ),
    "standard library": (
        "import re, math, collections, itertools, heapq, json, random, datetime, typing\n"
        "import functools, string, hashlib, decimal, fractions, statistics, bisect, copy\n"
        "import sqlite3, ssl, zlib, bz2, lzma, ctypes, xml.etree.ElementTree, unittest, csv\n"
        "import zoneinfo, uuid, queue\n"
        "import concurrent.futures, asyncio, array, struct, secrets, difflib, textwrap, doctest\n"
        "zoneinfo.ZoneInfo('Europe/Paris'); sqlite3.connect(':memory:').execute('select 1')"
    ),
    "asyncio": "import asyncio\nasync def one(): await asyncio.sleep(0); return 1\n"
    "assert asyncio.run(one()) == 1",
    "a data class and a string annotation": "import dataclasses, pickle, typing\n"
    "@dataclasses.dataclass\nclass P:\n    x: 'int' = 1\n"
    "assert pickle.loads(pickle.dumps(P(2))) == P(2); assert typing.get_type_hints(P)['x'] is int",
    "no features of the sandbox's own file": "def f(x: int): pass\n"
    "assert f.__annotations__ == {'x': int}",
    "main part not run": "if __name__ == '__main__': raise KeyError",
    "nothing on stdin": "try: input()\nexcept EOFError: pass",
    "odd encodings": "# -*- coding: utf-7 -*-\n# +AAo-raise KeyError\n"
    "π = '\u202e'; assert len(π) == 1",
    "signals to itself": "import os, signal\ngot = []\n"
    "signal.signal(signal.SIGUSR1, lambda *_: got.append(1)); signal.raise_signal(signal.SIGUSR1)\n"
    "os.kill(os.getpid(), signal.SIGUSR1); assert got == [1, 1]",
    "its limits can be read": "import resource\n"
    "assert resource.getrlimit(resource.RLIMIT_CPU) == (1, 2)",
    "the same random numbers each time": "import random\n"
    "assert random.random() == random.Random(0).random()",
    "deep folders": "import os\nfor n in range(300): os.mkdir('d'); os.chdir('d')\n",
}

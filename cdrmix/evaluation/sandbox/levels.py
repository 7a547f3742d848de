"""Levels of the sandbox: which of them this machine has, and how a zygote is started in each.

`kernel` needs nothing but a Linux kernel with Landlock and seccomp, and no privilege. `bwrap` adds
namespaces of bubblewrap's around it, in which other files and processes do not exist at all.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cdrmix.errors import DataError, PlanError
from cdrmix.evaluation.sandbox.landlock import landlock_version
from cdrmix.evaluation.sandbox.program import LevelName
from cdrmix.evaluation.sandbox.runner import GUARDS
from cdrmix.evaluation.sandbox.seccomp import ARCHITECTURE, has_seccomp

SOURCES = Path(__file__).resolve().parents[3]
# That of a virtual environment's, which needs no folder of the environment.
INTERPRETER: str = getattr(sys, "_base_executable", sys.executable)
_BWRAP_TRIAL_SECONDS = 20
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
# Read by Python and the C library themselves: time zones, encodings, where libraries are.
_SYSTEM_FOLDERS = ("/usr/share/zoneinfo", "/usr/lib/locale")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")
# Beside the standard library, and in it on some systems, stand packages: among them this one with
# the right solutions of its tasks.
_OTHERS_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class LevelState:
    """A level on this machine.

    Attributes:
        description: of the level as results name it, such as "kernel: Landlock ABI 7, seccomp
            x86_64"; "" if it is missing.
        missing: why this machine does not have it and what to do; "": it has it.
    """

    name: LevelName
    description: str
    missing: str


@dataclass(frozen=True)
class Reach:
    """Paths that a program may read, beside its own folder.

    Attributes:
        folders: with all below them.
        files: alone.
        listed: folders of which the names may be read, which Python needs to import from them.
        paths: sys.path of a program.
        packages: folders of packages that it may import, with all below them.
    """

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)


def _landlock_missing() -> str:
    if landlock_version():
        return ""
    return (
        "the kernel has no Landlock (it needs Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK "
        "and 'landlock' in the kernel's list lsm=)"
    )


def _missing_on_any_level() -> str:
    if sys.platform != "linux" or platform.machine() != ARCHITECTURE:
        return (
            f"it is made for Linux on {ARCHITECTURE}, not for {sys.platform} on "
            f"{platform.machine()}. Evaluate on another machine"
        )
    if not has_seccomp():
        return "the kernel has no seccomp filters (CONFIG_SECCOMP_FILTER)"
    return ""


def _kernel_state() -> LevelState:
    missing = _missing_on_any_level()
    if not missing and (missing := _landlock_missing()):
        missing += ". Use the level bwrap, with bubblewrap installed"
    version = 0 if missing else landlock_version()
    description = f"kernel: Landlock ABI {version}, seccomp {ARCHITECTURE}"
    return LevelState("kernel", "" if missing else description, missing)


def _bwrap_state() -> LevelState:
    missing = _missing_on_any_level()
    if not missing and not shutil.which("bwrap"):
        missing = "bubblewrap is not installed: on Debian, apt-get install bubblewrap"
    if not missing:
        missing = _bwrap_trial()
    if missing:
        return LevelState("bwrap", "", missing)
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True)
    landlock = f", Landlock ABI {landlock_version()}" if landlock_version() else ""
    return LevelState(
        "bwrap", f"{version.stdout.strip()}: namespaces{landlock}, seccomp {ARCHITECTURE}", ""
    )


def _bwrap_trial() -> str:
    """Starts the interpreter in bubblewrap; returns why that fails."""
    command = [*bwrap_command(Path("/tmp"), interpreter_reach(())), INTERPRETER, "-S", "-c", ""]
    trial = subprocess.run(
        command, capture_output=True, text=True, timeout=_BWRAP_TRIAL_SECONDS, check=False
    )
    if not trial.returncode:
        return ""
    said = trial.stderr.strip().splitlines()[-1:] or [f"exit status {trial.returncode}"]
    return (
        f"bubblewrap does not start here: {said[0][:200]}. It needs user namespaces "
        "(kernel.unprivileged_userns_clone, or the container's settings)"
    )


_STATES: dict[LevelName, Callable[[], LevelState]] = {
    "kernel": _kernel_state,
    "bwrap": _bwrap_state,
}


def available_levels() -> dict[LevelName, LevelState]:
    """State of each level on this machine."""
    return {name: state() for name, state in _STATES.items()}


def require_level(level: LevelName) -> LevelState:
    """State of a level that this machine has.

    Raises:
        PlanError: the machine does not have it, with the reason.
    """
    state = _STATES[level]()
    if state.missing:
        raise PlanError(f"evaluation.sandbox {level}: no program is run here: {state.missing}")
    return state


def interpreter_reach(packages: tuple[str, ...]) -> Reach:
    """Paths that Python's standard library and installed packages need.

    Raises:
        DataError: a package is not installed.
    """
    reach = _standard_reach()
    reach = Reach(*(list(part) for part in vars(reach).values()))
    for name in packages:
        _add_package(name, reach)
    return reach


@cache
def _standard_reach() -> Reach:
    """Reach without packages; it is made once, of some hundreds of paths."""
    reach = Reach(folders=[*_SYSTEM_FOLDERS], files=[*_SYSTEM_FILES])
    for folder in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}):
        reach.listed.append(folder)
        reach.paths.extend((folder, f"{folder}/lib-dynload"))
        for entry in Path(folder).iterdir():
            if entry.name not in _OTHERS_PACKAGES:
                (reach.folders if entry.is_dir() else reach.files).append(str(entry))
    reach.files.extend(_shared_libraries())
    return reach


def _shared_libraries() -> Iterator[str]:
    """Libraries that modules of the standard library load, each once."""
    prefix = Path(sys.base_prefix) / "lib"
    seen: set[Path] = set()
    for top in [*map(Path, _LIBRARY_FOLDERS), prefix]:
        for folder in [top, *top.glob("*-linux-gnu")]:
            if not folder.is_dir() or folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            for library in folder.glob("*.so*"):
                if library.is_file():
                    yield str(library)


def _add_package(name: str, reach: Reach) -> None:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"sandbox: the package {name!r}, which programs may import, is not installed"
        )
    for place in spec.submodule_search_locations:
        root = Path(place).parent
        reach.packages.append(place)
        libraries = root / f"{name}.libs"  # wheels keep shared libraries there
        if libraries.is_dir():
            reach.packages.append(str(libraries))
        if str(root) not in reach.paths:
            reach.listed.append(str(root))
            reach.paths.append(str(root))


def bwrap_command(folder: Path, reach: Reach) -> list[str]:
    """Command line of bubblewrap up to the program that it starts.

    Args:
        folder: the only one that can be written to.
    """
    # Interpreter, libraries, and this package's sources, which are read before any program runs.
    # Landlock hides them from programs, where there is Landlock.
    shown = [*_LIBRARY_FOLDERS, *_SYSTEM_FOLDERS, "/etc/ld.so.cache", "/etc/localtime"]
    mounts = [
        part
        for path in [*shown, sys.base_prefix, str(Path(INTERPRETER).parent)]
        for part in ("--ro-bind-try", path, path)
    ]
    hidden = [
        part
        for listed in reach.listed
        for name in _OTHERS_PACKAGES
        if (place := Path(listed) / name).is_dir()
        for part in ("--tmpfs", str(place))
    ]
    own = Path(__file__).resolve().parent
    sources = [str(own), *(str(above / "__init__.py") for above in own.parents[:2])]
    opened = [part for path in [*reach.packages, *sources] for part in ("--ro-bind", path, path)]
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        *mounts, *hidden, *opened, "--proc", "/proc", "--dev", "/dev",
        "--bind", str(folder), str(folder), "--chdir", str(folder), "--",
    ]  # fmt: skip


def zygote_command(level: LevelName, folder: Path, reach: Reach) -> list[str]:
    """Command line of a zygote in a level."""
    # As -I, but for the hash seed of the environment: the order of a set must not decide a verdict.
    # Neither site-packages nor the current folder is imported from.
    start = (
        f"import sys; sys.path.insert(0, {str(SOURCES)!r}); "
        "from cdrmix.evaluation.sandbox.zygote import main; main()"
    )
    python = [INTERPRETER, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", start]
    return [*bwrap_command(folder, reach), *python] if level == "bwrap" else python


def guards_of(level: LevelName) -> tuple[str, ...]:
    """Guards that a program of a level puts on."""
    without_landlock = level == "bwrap" and not landlock_version()
    return tuple(name for name in GUARDS if not (without_landlock and name == "landlock"))

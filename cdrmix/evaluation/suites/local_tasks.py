"""Tasks of lm-eval whose data are local: those in a folder, and the list of what is missing there.

A task is a definition of lm-eval (NAME.yaml) that names local data, or data of a well-known task as
published (`published_tasks`). No torch, and no lm_eval but for the path of its definitions.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.suites.published_tasks import (
    FORMATS,
    MMLU,
    SUFFIXES,
    Data,
    Format,
    Row,
    format_of,
    judged_files,
    read_published,
)

# Those that come with the suite.
OWN_TASKS = Path(__file__).parent / "tasks"
# Readers of files in `datasets`, by which a definition names local data.
_FILE_READERS = ("json", "csv", "parquet", "text", "arrow")
# Environments and caches of Python below a folder of tasks hold thousands of files.
_NOT_READ = frozenset(("__pycache__", "site-packages", "node_modules"))


@dataclass(frozen=True)
class LocalTask:
    """One task that can be run here.

    Attributes:
        origin: file that makes it a task: its definition, or its data as published.
        definition: lm-eval's file of it.
        data_files: of its definition, as given there but for absolute paths; None: as it says.
        rows: in place of a data set, for a task as published.
        digests: sha256 (hex) of each file that it depends on, by the name of the file.
    """

    name: str
    origin: Path
    definition: Path
    data_files: Any
    rows: list[Row] | None
    digests: dict[str, str]

    def stub(self, folder: Path) -> dict[str, Any]:
        """Returns a definition that includes this one and reads data from a path.

        Args:
            folder: for the caches of `datasets`, and the rows if there are some.
        """
        changes: dict[str, Any] = {"include": str(self.definition), "task": self.name}
        if self.rows is not None:
            rows = folder / f"{self.name}.rows"
            rows.write_text(json.dumps(self.rows), encoding="utf-8")
            nothing = ("dataset_name", "training_split", "validation_split", "fewshot_split", "tag")
            changes |= dict.fromkeys((*nothing, "fewshot_config"))
            changes |= {"dataset_kwargs": {"rows": str(rows)}, "test_split": "test"}
            return changes | {"num_fewshot": 0}
        if self.data_files is not None:
            files = {"data_files": self.data_files, "cache_dir": str(folder / "cache")}
            changes["dataset_kwargs"] = files
        return changes


class _Loader(yaml.SafeLoader):
    """Reads definitions; `!function` is for lm-eval to resolve."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


def find_tasks(place: Path | None) -> list[LocalTask]:
    """Finds the tasks of a folder, by name.

    Args:
        place: a folder, or one file of a task; None: the tasks that come with the suite.
    Raises:
        ConfigError: if lm_eval is not installed.
        DataError: if data of a task are missing, with the list of what to put where; if a file is
            no task, two tasks have one name, or there is none.
    """
    harness = _harness_folder()
    folder = OWN_TASKS if place is None else place
    if not folder.exists():
        raise DataError(f"{folder}: not found. Give --tasks with a folder of tasks:\n{_wanted()}")
    files = sorted(_files(folder)) if folder.is_dir() else [folder]
    root = folder if folder.is_dir() else folder.parent
    definitions = [path for path in files if path.suffix in (".yaml", ".yml")]
    missing: list[str] = []
    found = [task for path in definitions for task in _defined(path, missing)]
    if missing:
        raise DataError(
            f"{folder}: data of {len(missing)} of {len(definitions)} tasks are not here, and "
            "nothing is downloaded:\n" + "\n".join(f"  {line}" for line in missing)
        )
    taken = {name for task in found for name in task.digests}
    of_formats: dict[Format, list[Path]] = {}
    for path in files:
        is_data = path.suffix in SUFFIXES and str(path.resolve()) not in taken
        if is_data and (kind := format_of(path, root)) is not None:
            of_formats.setdefault(kind, []).append(path)
    for kind, paths in of_formats.items():
        for path in judged_files(kind, paths):
            found += [_published(data, harness) for data in read_published(kind, path)]
    if not found:
        raise DataError(f"{folder}: holds no task. Put there one or more of\n{_wanted()}")
    _refuse_doubles(found)
    return sorted((_with_names(task, root) for task in found), key=lambda task: task.name)


def dataset_of_rows(rows: str, **_: Any) -> dict[str, Any]:
    """Makes the data set of a task as published; lm-eval calls it, by the name in the stub.

    Args:
        rows: path of the file that `LocalTask.stub` has written.
    """
    import datasets

    return {"test": datasets.Dataset.from_list(json.loads(Path(rows).read_text(encoding="utf-8")))}


def write_stubs(tasks: Iterable[LocalTask], folder: Path) -> None:
    """Writes the definitions that lm-eval is to read into an empty folder."""
    for task in tasks:
        lines = [f"{key}: {json.dumps(value)}" for key, value in task.stub(folder).items()]
        if task.rows is not None:
            lines.append(f"custom_dataset: !function {__name__}.{dataset_of_rows.__name__}")
        (folder / f"{task.name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _harness_folder() -> Path:
    """lm-eval's own definitions."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the suite zero-shot needs the package lm_eval: pip install 'cdrmix[evaluation]'"
        )
    return Path(spec.submodule_search_locations[0]) / "tasks"


def _files(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name for name in folders if name not in _NOT_READ and not name.startswith(".")
        )
        yield from (Path(top) / name for name in names)


def _wanted() -> str:
    """Lines that say which files a folder of tasks can have."""
    lines = ["  NAME.yaml, a task of lm-eval with dataset_path: json and data_files of local files"]
    return "\n".join(lines + [f"  {each.task}: {each.published}" for each in FORMATS])


def _read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """Values of a definition with those that it includes, and all files of them."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (a SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as a task of lm-eval: {reason}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: is no task of lm-eval: a definition has keys, such as `task`")
    values: dict[str, Any] = {}
    files = [path]
    included = content.pop("include", [])
    for name in included if isinstance(included, list) else [included]:
        inner = path.parent / str(name)
        if inner in seen:
            raise DataError(f"{path}: includes {inner}, which includes it. Leave one out")
        more, its_files = _read_yaml(inner, (*seen, path))
        values |= more
        files += its_files
    return values | content, files


def _defined(path: Path, missing: list[str]) -> Iterator[LocalTask]:
    """The task of a definition, if it is one; adds to `missing` what it lacks."""
    values, files = _read_yaml(path)
    if "group" in values:  # a list of other tasks, which are found by themselves
        return
    name = values.get("task")
    if name is None and path.name.startswith("_"):  # a part that others include
        return
    if not isinstance(name, str) or not name:
        raise DataError(f"{path}: has no field `task`, the name of the task. Add it")
    if "/" in name:
        raise DataError(f"{path}: the name of its task, {name!r}, has a slash. Give another one")
    for field in ("doc_to_text", "doc_to_target"):
        if field not in values:
            raise DataError(f"{path}: task {name} has no field `{field}`. Add it")
    if "custom_dataset" in values:
        yield LocalTask(name, path, path.resolve(), None, None, _digests(files))
        return
    source = values.get("dataset_path")
    if source is None:
        raise DataError(
            f"{path}: task {name} has no field `dataset_path`. Give json, and the paths of its "
            "data as dataset_kwargs: {data_files: {test: FILE.jsonl}}"
        )
    place = f"{name} ({path.name})"
    options = values.get("dataset_kwargs") or {}
    if source not in _FILE_READERS or "data_files" not in options:
        known = next((each for each in FORMATS if each.task == name), None)
        if name.startswith("mmlu_"):
            known = MMLU
        instead = f", or {known.published} in place of {path.name}" if known else ""
        missing.append(
            f"{place}: reads the data set {source} of the hub. Give dataset_path: json and "
            f"dataset_kwargs: {{data_files: {{test: FILE.jsonl}}}}{instead}"
        )
        return
    data_files, paths, absent = _resolved(options["data_files"], path.parent)
    if absent:
        missing.append(f"{place}: put {', '.join(absent)} into {path.parent}")
        return
    yield LocalTask(name, path, path.resolve(), data_files, None, _digests([*files, *paths]))


def _resolved(given: Any, folder: Path) -> tuple[Any, list[Path], list[str]]:
    """data_files with absolute paths, those paths, and the ones that are not there.

    Paths are below the folder of the definition, or else below the current one.
    """
    if isinstance(given, Mapping):
        parts = {part: _resolved(files, folder) for part, files in given.items()}
        data_files: Any = {part: files for part, (files, _, _) in parts.items()}
        found = list(parts.values())
    elif isinstance(given, list):
        found = [_resolved(each, folder) for each in given]
        data_files = [files for files, _, _ in found]
    else:
        for base in (folder, Path()):
            path = (base / str(given)).absolute()
            if path.is_file():
                return str(path), [path], []
        return given, [], [str(given)]
    paths = [path for _, its, _ in found for path in its]
    return data_files, paths, [name for _, _, names in found for name in names]


def _published(data: Data, harness: Path) -> LocalTask:
    definition = harness / data.definition
    if not definition.is_file():
        raise DataError(
            f"{data.files[0]}: lm-eval knows no task {data.task} ({definition} is not there). "
            "Rename the file, or its field subject"
        )
    _, files = _read_yaml(definition)
    return LocalTask(
        data.task, data.files[0], definition, None, data.rows, _digests([*files, *data.files])
    )


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    return {
        str(path.resolve()): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(set(paths))
    }


def _with_names(task: LocalTask, root: Path) -> LocalTask:
    """The task, its digests by paths in the folder of tasks, or by names outside of it."""
    digests = {}
    for path, digest in task.digests.items():
        inside = Path(path).is_relative_to(root.resolve())
        digests[str(Path(path).relative_to(root.resolve())) if inside else Path(path).name] = digest
    return replace(task, digests=digests)


def _refuse_doubles(tasks: list[LocalTask]) -> None:
    """Raises DataError if two tasks have one name."""
    seen: dict[str, LocalTask] = {}
    for task in tasks:
        if task.name in seen:
            raise DataError(
                f"{task.origin}: its task is called {task.name}, and so is that of "
                f"{seen[task.name].origin}. Rename one (`task:` of its definition), or take it out"
            )
        seen[task.name] = task

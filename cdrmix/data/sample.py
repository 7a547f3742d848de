"""The sample corpus: text that every Python ships, as a built folder of token shards.

Two domains. `code`: the source files of the standard library as they are. `prose`: the docstrings
of each file under their names, and the language reference inside `pydoc_data`. A file's code and
docstrings are always in the same split, so nothing held out is trained on; the docstrings of a
split are in it twice, because code without them would not be code as people write it.
"""

import ast
import contextlib
import hashlib
import os
import platform
import sysconfig
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdrmix.data.folders import locked, new_folder, remove_unfinished
from cdrmix.data.shards import (
    MANIFEST_FILE,
    ShardInfo,
    TokenizerInfo,
    new_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
    write_shards,
)
from cdrmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_tokenizer
from cdrmix.errors import DataError
from cdrmix.log import get_logger

_VALIDATION_SHARE = 0.05  # of the source files
# Tests are left out because Debian ships none; installed packages and local settings, because the
# corpus must depend on nothing but the Python.
_SKIPPED = {
    *("__pycache__", "idle_test", "pydoc_data", "test", "tests", "dist-packages", "site-packages"),
    *("sitecustomize.py", "usercustomize.py"),
}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
_DOCSTRING_CHARACTERS = range(80, 20_000)
_PARAGRAPH_CHARACTERS = 80
_TOPICS = "pydoc_data/topics.py"
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_logger = get_logger(__name__)


@dataclass(frozen=True)
class SampleDocument:
    """One text."""

    path: str  # of its source file, relative to the standard library
    domain: str
    text: str

    @property
    def split(self) -> str:
        """validation for about 5 % of the source files, by hash of the path, else train."""
        number = int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:8], "big")
        return "validation" if number < _VALIDATION_SHARE * 2**64 else "train"


def ensure_sample(vocab_size: int, root: Path = Path("data")) -> Path:
    """Returns the folder of the sample corpus with `vocab_size` slots, built on first use.

    Safe to call from several processes: one builds, the others wait for it.
    """
    folder = sample_folder(vocab_size, root)
    build_sample(folder, vocab_size)
    return folder


def sample_folder(vocab_size: int, root: Path = Path("data")) -> Path:
    """Folder of the sample corpus with `vocab_size` slots, built or not."""
    return Path(root) / f"sample-{vocab_size}"


def build_sample(out: Path, vocab_size: int, *, stdlib: Path | None = None) -> None:
    """Builds the sample corpus into `out`, unless it is there; all of it appears, or nothing.

    Args:
        stdlib: folder of sources; None: the standard library of this Python.
    Raises:
        DataError: if there are no sources, `out` holds something else, or it cannot be written.
    """
    try:
        if (out / MANIFEST_FILE).exists():
            return
        lock = out.parent / f".{out.name}.lock"
        with contextlib.ExitStack() as stack:
            if not stack.enter_context(locked(lock, blocking=False)):
                _logger.info("sample corpus: another process builds %s; waiting for it", out)
                stack.enter_context(locked(lock, blocking=True))
            if (out / MANIFEST_FILE).exists():  # built while this process waited for the lock
                return
            if out.exists():
                raise DataError(
                    f"{out}: exists and holds no {MANIFEST_FILE}. Move it away; a data set is "
                    "built there."
                )
            _build(out, vocab_size, stdlib or Path(sysconfig.get_path("stdlib")))
    except OSError as error:
        raise DataError(
            f"{error.filename or out}: {error.strerror}. The sample corpus is built in "
            f"{out.parent}, which must be writable and have 30 MB free. Make room, or build it "
            "elsewhere with `cdrmix data sample --out DIR` and set data.path = DIR."
        ) from error


def _build(out: Path, vocab_size: int, stdlib: Path) -> None:
    _logger.info("sample corpus: reading the sources in %s", stdlib)
    first: dict[str, SampleDocument] = {}  # by text: equal ones once
    for document in read_standard_library(stdlib):
        if document.text.strip():
            first.setdefault(document.text, document)
    documents = list(first.values())
    if not documents:
        raise DataError(
            f"{stdlib}: holds no Python sources, from which the sample corpus is built (a "
            "Python that ships them compiled or in a zip file?). Use another Python, or set "
            "data.path to a folder of token shards."
        )
    megabytes = sum(len(document.text.encode()) for document in documents) / 1e6
    message = "sample corpus: %d documents, %.1f MB; training a tokenizer of %d tokens"
    _logger.info(message, len(documents), megabytes, vocab_size)
    # The validation split stays unseen, by the tokenizer too.
    trained = train_tokenizer((d.text for d in documents if d.split == "train"), vocab_size)
    remove_unfinished(out)  # under the lock: no other process is building
    with new_folder(out) as folder:
        file = write_file(folder / TOKENIZER_FILE, trained.to_str(pretty=True).encode())
        tokenizer = load_tokenizer(folder)
        streams = defaultdict(list)
        for document in documents:
            streams[document.split, document.domain].append(document.text)
        shards: list[ShardInfo] = []
        dtype = smallest_dtype(vocab_size)
        for (split, domain), texts in sorted(streams.items()):
            pieces = (
                (np.array([*ids, tokenizer.eos_id]), len(text.encode()))
                for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True)
            )
            shards += write_shards(folder, pieces, split=split, domain=domain, dtype=dtype)
        num_tokens = tokenizer.vocab_size
        info = TokenizerInfo(file=TOKENIZER_FILE, sha256=file.sha256, num_tokens=num_tokens)
        source = {"text": "Python standard library", "python": platform.python_version()}
        eos_id = tokenizer.eos_id
        manifest = new_manifest(
            shards, vocab_size=vocab_size, tokenizer=info, eos_id=eos_id, source=source
        )
        write_manifest(folder, manifest)
    tokens = ", ".join(f"{part.tokens:,} {split}" for split, part in manifest.splits.items())
    _logger.info("sample corpus: %s; tokens: %s", out, tokens)


def read_standard_library(stdlib: Path) -> Iterator[SampleDocument]:
    """Reads code and prose of the sources below `stdlib`, in sorted order of their paths."""

    def is_kept(name: str) -> bool:
        return name not in _SKIPPED and not name.startswith(_SKIPPED_PREFIXES)

    paths = {}
    for folder, folders, names in os.walk(stdlib):
        folders[:] = filter(is_kept, folders)  # in place: os.walk then skips the others
        for path in (Path(folder, name) for name in names if is_kept(name)):
            if path.name.endswith(".py"):
                paths[path.relative_to(stdlib).as_posix()] = path
    for name, path in sorted(paths.items()):
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            _logger.warning("sample corpus: %s left out: %s", path, error)
            continue
        # Generated tables of characters, nearly equal to each other.
        if "Character Mapping Codec" in text[:200]:
            continue
        yield SampleDocument(name, "code", text)
        yield SampleDocument(name, "prose", "\n\n\n".join(_docstrings(text, name)))
    yield from _topics(stdlib)


def _docstrings(text: str, path: str) -> Iterator[str]:
    """Docstrings of usual length in a source file, each under its dotted name."""
    with warnings.catch_warnings(action="ignore"):  # old sources have invalid escapes
        try:
            module = ast.parse(text)
        except SyntaxError:  # templates and sources of other Python versions
            return
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for dotted, node in _definitions(module, name):
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) in _DOCSTRING_CHARACTERS:
            yield f"{dotted}\n\n{docstring}"


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.Module | _Definition]]:
    """The node itself and its definitions, inside `if` and `try` too, with dotted names."""
    if isinstance(node, ast.Module | _Definition):
        yield name, node
    for child in [*getattr(node, "body", []), *getattr(node, "orelse", [])]:
        if isinstance(child, _Definition):
            yield from _definitions(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(child, name)


def _topics(stdlib: Path) -> Iterator[SampleDocument]:
    """Topics of the language reference, without those that are excerpts of a longer one."""
    path = stdlib / _TOPICS
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
        assignments = [node for node in module.body if isinstance(node, ast.Assign)]
        topics: dict[str, str] = ast.literal_eval(assignments[0].value)
    except (OSError, SyntaxError, ValueError, IndexError) as error:
        _logger.info("sample corpus: goes on without %s: %s", path, error)
        return
    # Longest first, so that an excerpt comes after the topic that it is from.
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = {p for p in topics[name].split("\n\n") if len(p) >= _PARAGRAPH_CHARACTERS}
        if len(paragraphs & seen) <= len(paragraphs) // 10:
            yield SampleDocument(f"{_TOPICS}#{name}", "prose", topics[name])
        seen |= paragraphs

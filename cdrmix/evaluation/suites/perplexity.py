"""Suite `perplexity`: loss on held-out text, packed as in training and document by document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix import runtime
from cdrmix.data.document import fim_ids
from cdrmix.data.shards import Manifest, manifest_digest, read_manifest
from cdrmix.data.token_dataset import Permutation, TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.held_out import held_out_documents, text_documents
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.monitoring.suite_results import Row, SuiteResult, bootstrap_interval

if TYPE_CHECKING:
    from cdrmix.evaluation.perplexity import Apart

# Documents read in several ways together cost about as much as the packed samples.
_SHARE_OF_DOCUMENTS = 0.25
_LARGEST_EXPONENT = 700.0  # exp(709.8) is the largest float64


@dataclass(frozen=True)
class _Options:
    """Windows of documents and most tokens of an evaluation; None: by the model."""

    window: int | None
    stride: int | None
    max_tokens: int | None

    @classmethod
    def of(cls, request: Request) -> _Options:
        """Reads the options of a request. Raises ConfigError if one is no count."""
        found: dict[str, int | None] = {}
        for name in ("window", "stride", "max_tokens"):
            given = request.options.get(name)
            found[name] = None if given is None else _count(name, given)
        options = cls(**found)
        if options.window is not None:
            options.windows(options.window)
        return options

    def windows(self, longest: int) -> tuple[int, int]:
        """Window and stride for a model whose inputs have at most `longest` tokens. Raises
        ConfigError if they cannot be."""
        window = self.window or longest
        stride = self.stride or max(1, window // 2)
        if window > longest:
            raise ConfigError(
                f"perplexity: a window of {window:,} tokens is longer than the model's inputs, "
                f"{longest:,}. Give a window of at most that"
            )
        if stride > window:
            raise ConfigError(
                f"perplexity: a stride of {stride:,} tokens would leave out some behind a window "
                f"of {window:,}. Give a stride of at most the window"
            )
        return window, stride


def _count(name: str, given: Any) -> int:
    try:
        value = int(given)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"perplexity: {name} = {given} is no number of tokens. Give 1 or more")
    return value


class _Documents(NamedTuple):
    """Documents to measure: tokens without prefix, UTF-8 bytes of the text, domain of each."""

    tokens: list[NDArray[np.int64]]
    num_bytes: NDArray[np.int64]
    domains: list[str]
    settings: dict[str, Any]  # that name them

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Predicted tokens of each."""
        return np.array([len(tokens) for tokens in self.tokens])


class Perplexity:
    """Loss of held-out text in nats per token, perplexity and bits per byte.

    `packed` are samples of the training's length, as in training. `documents` are documents by
    themselves behind a prefix token, in windows with a stride. Where a model has a recurrent state
    and a document takes several windows, `documents-carried` are the same ones in windows one
    behind another through which the state is carried, and `documents-reset` in the same windows
    without it. Domains follow a colon.

    A data set in tokens of another tokenizer is read document by document alone: bits per byte are
    those of the same text.
    """

    options = {
        "window": "tokens of an input of documents; default: the longest inputs of the model",
        "stride": "tokens predicted by each later window of a document; default: half a window",
    }

    def check(self, request: Request) -> None:
        """Raises ConfigError or DataError if options or files of text cannot be used."""
        _Options.of(request)
        if request.tasks is not None:
            text_documents(request.tasks)

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Measures held-out text of the data set, or texts of `request.tasks` alone."""
        options = _Options.of(request)
        window, stride = options.windows(judged.max_length)
        max_tokens = options.max_tokens or judged.config.evaluation.final_tokens
        rows: list[Row] = []
        details: dict[str, Any] = {}
        settings: dict[str, Any] = {"seed": request.seed, "window": window, "stride": stride}
        if request.tasks is not None:
            documents = _of_files(judged, request.tasks, request)
        elif judged.data is not None:
            manifest = read_manifest(judged.data)
            settings["data_digest"] = manifest_digest(manifest)
            if judged.tokenizer_digest in (None, manifest.tokenizer.sha256):
                packed, details, settings["packed"] = _packed(
                    judged, judged.data, max_tokens, request
                )
                rows += packed
            else:
                settings["packed"] = "left out: the data set is in tokens of another tokenizer"
            most = int(max_tokens * _SHARE_OF_DOCUMENTS)
            documents = _of_folder(judged, judged.data, manifest, request, most)
        else:
            raise DataError(f"{judged.no_data}; or --tasks with .txt or .jsonl files of text")
        by_document, ways = _document_rows(judged, documents, window, stride, request.seed)
        prefix = judged.tokenizer.prefix_ids[-1]
        settings |= {
            "prefix_token": prefix,
            "prefix_text": judged.tokenizer.decode([prefix]),
            "documents": len(documents.tokens),
            "tokens": int(documents.num_tokens.sum()),
            "bytes": int(documents.num_bytes.sum()),
            **documents.settings,
            **ways,
        }
        return judged.result(
            "perplexity",
            rows + by_document,
            settings=settings,
            details=details,
            notes=_notes(settings),
        )


def _packed(
    judged: Judged, folder: Path, max_tokens: int, request: Request
) -> tuple[list[Row], dict[str, Any], dict[str, Any]]:
    """Rows of the packed samples, the evaluation of a run's end, and settings."""
    from cdrmix.evaluation.perplexity import evaluate_apart

    config = judged.config
    length = config.training.sequence_length
    dataset = runtime.together(lambda: TokenDataset(folder, "validation", length))
    if request.limit is not None:
        max_tokens = min(max_tokens, request.limit * length)
    apart = evaluate_apart(
        judged.model,
        dataset,
        max_tokens=max_tokens,
        batch_size=judged.batch_size,
        segment_documents=config.data.segment_documents,
        fim_ids=fim_ids(judged.tokenizer) if config.objectives is not None else None,
        topology=judged.topology,
    )
    settings = {
        "sequence_length": length,
        "samples": len(apart.tokens),
        "tokens": apart.whole.tokens,
        "segment_documents": config.data.segment_documents,
    }
    return (
        _packed_rows(apart, dataset.bytes_per_token, request.seed),
        apart.whole.as_json(),
        settings,
    )


def _packed_rows(apart: Apart, bytes_per_token: float, seed: int) -> list[Row]:
    whole = apart.whole
    count = len(apart.tokens)
    rows = _three_rows("packed", apart.nats, apart.tokens, apart.tokens * bytes_per_token, seed)
    for domain in whole.domains:
        name = f"packed:{domain.domain}"
        rows.append(Row(name, "nats_per_token", domain.loss, None, None, count))
    for part in whole.objectives:
        name = f"packed:objective {part.objective}"
        rows.append(Row(name, "nats_per_token", part.loss, None, None, count))
    return rows


def _three_rows(
    task: str,
    nats: NDArray[np.float64],
    tokens: NDArray[Any],
    num_bytes: NDArray[Any],
    seed: int,
) -> list[Row]:
    """Nats per token, perplexity and bits per byte of examples with so many of each."""
    count = len(nats)
    of_tokens = _mean(nats, tokens, seed)
    of_bytes = _mean(nats / math.log(2), num_bytes, seed)
    # Rises with the loss, and so do the ends of its interval.
    exponentials = [None if each is None else _perplexity(each) for each in of_tokens[1:]]
    return [
        Row(task, "nats_per_token", *of_tokens, count),
        Row(task, "perplexity", _perplexity(of_tokens[0]), exponentials[0], exponentials[1], count),
        Row(task, "bits_per_byte", *of_bytes, count),
    ]


def _mean(
    sums: NDArray[np.float64], sizes: NDArray[Any], seed: int
) -> tuple[float, float | None, float | None]:
    """Mean of sums over examples of such sizes, and its interval; None of a single example."""
    mean = math.fsum(sums) / float(sizes.sum())
    if len(sums) < 2:
        return mean, None, None
    return mean, *bootstrap_interval((sums / sizes).tolist(), sizes.tolist(), seed=seed)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, _LARGEST_EXPONENT))


def _of_folder(
    judged: Judged, folder: Path, manifest: Manifest, request: Request, most_tokens: int
) -> _Documents:
    """Held-out documents of a built folder: `limit`, or as many as have `most_tokens`; one at
    least. Those in tokens of another tokenizer are encoded anew."""
    found = runtime.together(partial(held_out_documents, folder))
    stored = judged.tokenizer
    is_other = judged.tokenizer_digest not in (None, manifest.tokenizer.sha256)
    if is_other:
        stored = runtime.together(partial(load_tokenizer, folder))
    prefix = len(stored.document_prefix)
    order = [i for i in _order(len(found), request) if len(found[i].tokens) > prefix]
    if not order:
        raise DataError(f"{folder}: its held-out documents have no text. Give --data with others")
    if request.limit is None:
        sizes = np.cumsum([len(found[i].tokens) for i in order])
        order = order[: max(1, int(np.searchsorted(sizes, most_tokens, side="right")))]
    else:
        order = order[: request.limit]
    tokens = [found[i].tokens[prefix:] for i in order]
    texts = [stored.decode(ids.tolist()) for ids in tokens]
    if is_other:
        tokens = [np.array(ids, np.int64) for ids in judged.tokenizer.encode_batch(texts)]
    return _Documents(
        tokens,
        np.array([len(text.encode()) for text in texts]),
        [found[i].domain for i in order],
        {},  # the digest of the folder names them
    )


def _of_files(judged: Judged, place: Path, request: Request) -> _Documents:
    """Texts of files, `limit` of them; the first rank alone needs the files."""
    texts = runtime.first_rank_does(partial(text_documents, place))
    chosen = [texts.documents[i] for i in _order(len(texts.documents), request)[: request.limit]]
    tokens = judged.tokenizer.encode_batch([each.text for each in chosen])
    return _Documents(
        [np.array(ids, dtype=np.int64) for ids in tokens],
        np.array([len(each.text.encode()) for each in chosen]),
        [each.domain for each in chosen],
        {"tasks": str(place), "digests": texts.digests},
    )


def _order(count: int, request: Request) -> list[int]:
    """Numbers of documents in an order that the seed fixes."""
    if not count:
        return []
    numbers: list[int] = Permutation(count, (request.seed,))(np.arange(count)).tolist()
    return numbers


def _document_rows(
    judged: Judged, documents: _Documents, window: int, stride: int, seed: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of documents in each way of reading them, and what the settings say of the ways."""
    from cdrmix.evaluation.documents import Reading, carried_nats, carries_state, reset_nats

    prefix = judged.tokenizer.prefix_ids[-1:]
    whole = [np.concatenate([prefix, tokens]) for tokens in documents.tokens]
    surroundings = (judged.tokenizer.pad_id, window, judged.batch_size, judged.topology)
    read = reset_nats(judged.model, Reading(whole, *surroundings), stride=stride)
    ways = {"documents": read}
    longer = np.flatnonzero(documents.num_tokens > window)
    state = "carried and reset"
    if judged.model.config.kind == "hf":
        state = "reset: the state of a Hugging Face model is not carried"
    elif not carries_state(judged.model.config):
        state = "reset: the model has no recurrent state that can be carried"
    elif not len(longer):
        state = f"reset: no document has more tokens than a window of {window:,}"
    else:
        # Of a single window there is one result, whatever the way.
        several = Reading([whole[i] for i in longer], *surroundings)
        carried = carried_nats(judged.model, several)
        reset = reset_nats(judged.model, several, stride=window, overlap=False)
        for name, found in (("documents-carried", carried), ("documents-reset", reset)):
            ways[name] = read.copy()
            ways[name][longer] = found
    rows: list[Row] = []
    for name, nats in ways.items():
        rows += _by_domain(name, nats, documents, seed)
    return rows, {"state": state, "longer_documents": len(longer)}


def _by_domain(task: str, nats: NDArray[np.float64], documents: _Documents, seed: int) -> list[Row]:
    """Rows of all documents and, where there are several domains, of each."""
    tokens, num_bytes = documents.num_tokens, documents.num_bytes
    rows = _three_rows(task, nats, tokens, num_bytes, seed)
    names: Sequence[str] = sorted(set(documents.domains))
    for domain in names if len(names) > 1 else ():
        here = np.flatnonzero(np.array(documents.domains) == domain)
        name = f"{task}:{domain}"
        rows += _three_rows(name, nats[here], tokens[here], num_bytes[here], seed)
    return rows


def _notes(settings: dict[str, Any]) -> list[str]:
    """Lines below the table: how documents were read."""
    return [
        f"documents: windows of {settings['window']:,} tokens, stride {settings['stride']:,}, "
        f"behind {settings['prefix_text']!r}; {settings['tokens']:,} tokens, "
        f"{settings['bytes']:,} bytes",
        f"state of windows: {settings['state']}",
    ]

"""Suite `infill`: lines of held-out documents, left out and written by the model."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from cdrmix import runtime
from cdrmix.data.shards import manifest_digest, read_manifest
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.held_out import held_out_documents
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.monitoring.suite_results import Row, SuiteResult


class Infill:
    """Share of left-out lines that are written exactly, prefix first (`psm`) and suffix first
    (`spm`); `psm-other-suffix` and `spm-other-suffix` are the controls, with what is behind the
    line taken from another document.

    `limit` lines are asked for, 100 by default, each of another document.
    """

    def check(self, request: Request) -> None:
        """Raises ConfigError for a single line, or for tasks from files."""
        if request.limit == 1:
            raise ConfigError("infill: --limit 1 is too few: suffixes are swapped. Give 2 or more")
        if request.tasks is not None:
            raise ConfigError(
                "infill: leaves out lines of held-out documents and reads no tasks. Leave --tasks "
                "out, or give --data DIR"
            )

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Measures the lines in both orders, each with its control."""
        from cdrmix.evaluation.infilling import NUM_EXAMPLES, evaluate_infilling
        from cdrmix.evaluation.scoring import Scorer

        if judged.data is None:
            raise DataError(judged.no_data)
        manifest = read_manifest(judged.data)
        if judged.tokenizer_digest not in (None, manifest.tokenizer.sha256):
            raise DataError(
                f"{judged.data}: its documents are in tokens of another tokenizer than the "
                "model's. Give --data DIR, a data set of its tokenizer"
            )
        documents = runtime.together(partial(held_out_documents, judged.data))
        found = evaluate_infilling(
            Scorer.of(judged),
            [each.tokens for each in documents],
            num_examples=request.limit or NUM_EXAMPLES,
            seed=request.seed,
        )
        rows = []
        for each in found:
            right = (each.exact, each.low, each.high)
            control = (each.other_suffix, each.other_low, each.other_high)
            rows.append(Row(each.order, "exact", *right, each.examples))
            rows.append(Row(f"{each.order}-other-suffix", "exact", *control, each.examples))
        return judged.result(
            "infill",
            rows,
            settings={
                "seed": request.seed,
                "window": judged.max_length,
                "decoding": "greedy",
                "prefix_tokens": list(judged.tokenizer.prefix_ids),
                "data_digest": manifest_digest(manifest),
            },
            details={"infill": [asdict(each) for each in found]},
        )

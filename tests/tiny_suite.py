"""A suite of evaluations that is quick: held-out loss, and the score of a text, in any layout."""

from __future__ import annotations

from cdrmix.evaluation.suite import SUITES, Judged, Request
from cdrmix.monitoring.suite_results import Row, SuiteResult


class TinySuite:
    """Held-out loss, and the log-probability of a text that all ranks score alike."""

    options = {"text": "what is scored"}

    def check(self, request: Request) -> None:
        """Nothing is needed."""

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Gives a row of each; without a data set that of the text alone."""
        import torch
        from torch.nn import functional as F

        from cdrmix.data.token_dataset import TokenDataset
        from cdrmix.evaluation.perplexity import evaluate

        rows = []
        if judged.data is not None:
            dataset = TokenDataset(judged.data, "validation", judged.max_length)
            found = evaluate(
                judged.model,
                dataset,
                max_tokens=request.options.get("max_tokens", 1_000),
                batch_size=judged.batch_size,
                topology=judged.topology,
            )
            rows.append(Row("held-out", "nats_per_token", found.loss, None, None, found.tokens))
        text = str(request.options.get("text", "def f(x): return x"))
        ids = torch.tensor([[*judged.tokenizer.prefix_ids, *judged.tokenizer.encode(text)]])
        ids = ids.to(judged.model.device)
        with torch.no_grad():
            logits = judged.model.logits(judged.model(ids[:, :-1]).hidden).float()
        nats = F.cross_entropy(logits[0], ids[0, 1:], reduction="sum")
        rows.append(Row("text", "nats", float(nats), None, None, ids.shape[1] - 1))
        return SuiteResult("perplexity", rows, judged.source, judged.step, judged.weights)


def register() -> None:
    """Puts it into the place of the suite perplexity, in this process."""
    SUITES["perplexity"] = (__name__, TinySuite.__name__)

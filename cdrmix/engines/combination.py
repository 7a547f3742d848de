"""Loss of Stage A as a combination of objectives, each a mean over its labels in the global batch.

    L = sum_o lambda_o / Z_o sum_{t in o} CE_t + c_z / Z sum_t lambda_o(t) log_total_t^2
        + sum_k mu_k / Z_k sum_t CE(head_k, x_{t+k}) + sum_p weight_p / count_p total_p

Z_o is the number of labels of objective o, Z the sum of lambda_o Z_o, and Z_k the number of labels
that are k tokens ahead (`model.mtp`), over all ranks and micro-steps; totals and counts are those
of a user's terms (`objectives.plugins`). Factors on labels are of the
order of 1 (`Combination.factor`), and one common scale follows behind the loss: in fp16, gradients
of a factor such as 1 / Z would vanish before DeepSpeed scales them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.objectives import further_weights
from cdrmix.config.schema import Config
from cdrmix.data.document import KINDS, ROLES, fim_ids
from cdrmix.data.remote import remote_files
from cdrmix.data.token_dataset import Permutation
from cdrmix.engines.further_labels import FurtherLabels, Predicts, further_names
from cdrmix.engines.training_data import Corpus
from cdrmix.engines.users_terms import UsersTerms, label_of, own_counts, term_names
from cdrmix.log import get_logger
from cdrmix.models.backbone import Scorer
from cdrmix.monitoring.metrics import member_name
from cdrmix.objectives.language_model import IGNORED_LABEL, LabelWeights, sum_weights
from cdrmix.planning.plugins import terms_of

logger = get_logger(__name__)

CHAIN_PARTS = ROLES[1:]
_LOOKED_AT = 64  # samples, for the documents that are in them
# Tensors of a batch by the names that `Loader` gives them.
Batch = dict[str, Tensor]


def objective_of(kind: str) -> str:
    """Name of the objective, a key of the section `objectives`, that labels of a kind are of."""
    return "fim" if kind == "fim_middle" else kind


def weight_names(config: Config) -> tuple[str, ...]:
    """Names of the weights that ranks exchange before a step, in order.

    Labels of each kind; without the section `objectives`, `tokens`: all labels, or their weight.
    Then labels of the tokens 2 to n, `mtp_2` to `mtp_n`, that `model.mtp` predicts, and what the
    terms of a user's count.
    """
    of_next = ("tokens",) if config.objectives is None else KINDS
    return (*of_next, *further_names(config), *term_names(config))


def own_weights(batch: Batch, config: Config) -> list[float]:
    """Counts, by `weight_names`, of a rank's share of a batch, of tensors [A, B, T]."""
    labels = batch["labels"]
    further = []
    if config.model.mtp is not None:
        further = (batch["further_labels"] != IGNORED_LABEL).flatten(0, -2).sum(0).tolist()
    if config.objectives is None:
        return [float(sum_weights(labels, batch.get("weights"))), *map(float, further)]
    counted = batch["kinds"][labels != IGNORED_LABEL].long()
    counts = torch.bincount(counted, minlength=len(KINDS)).tolist()
    return [float(count) for count in (*counts, *further, *own_counts(batch, config))]


def with_further_labels(batch: Batch, config: Config) -> Batch:
    """Puts two tensors in the place of a batch's `targets`, [..., T, n]; of whole samples.

    `further_labels` are the tokens 2 to n ahead that are learned: targets, but for those that weigh
    nothing as a next token, such as the question of a chain of thought. `following` are the tokens
    1 to n - 1 ahead as they stand in the sample, which parts may read: also those of the next
    document, which are nobody's targets; -100 beyond the sample.
    """
    if config.model.mtp is None:
        return batch
    worth = batch.get("weights")
    if config.objectives is not None:
        lambdas = [getattr(config.objectives, objective_of(kind)) for kind in KINDS]
        worth = torch.tensor(lambdas)[batch["kinds"].long()]
    # The last label is the token behind the last input, unless documents are apart there.
    tokens = torch.cat([batch["input_ids"], batch["labels"][..., -1:]], dim=-1)
    targets = batch["targets"]
    following = torch.stack(
        [
            F.pad(tokens[..., ahead:], (0, ahead - 1), value=IGNORED_LABEL)
            for ahead in range(1, targets.shape[-1])
        ],
        dim=-1,
    )
    further = targets[..., 1:].clone()
    if worth is not None:
        for later in range(1, further.shape[-1] + 1):
            # The token at k = later + 1 ahead of t is the label of position t + later.
            of_label = F.pad(worth[..., later:], (0, later))
            further[..., later - 1].masked_fill_(of_label == 0, IGNORED_LABEL)
    kept = {name: values for name, values in batch.items() if name != "targets"}
    return kept | {"further_labels": further, "following": following}


def describe_objectives(config: Config, corpus: Corpus) -> None:
    """Log the objectives of a run, and warn of those that its training data have no tokens of."""
    if config.objectives is None:
        return
    weights = config.objectives.model_dump(exclude_none=True, exclude={"plugins"})
    weights |= {each.label: each.weight for each in config.objectives.plugins}
    parts = ", ".join(f"{name} {weight}" for name, weight in weights.items())
    logger.info("objectives: %s", parts)
    shards = [shard for shard in corpus.manifest.shards if shard.split == "train"]
    missing = {}
    if not any(shard.roles for shard in shards):
        missing = dict.fromkeys(CHAIN_PARTS, "a chain of thought (chain_of_thought of a source)")
    if not _has_fim(corpus):
        missing["fim"] = f"a document rearranged for infilling (fim) in {_LOOKED_AT} samples"
    for name, weight in config.objectives.chosen().items():
        if name in missing:
            logger.warning(
                "warning: objectives.%s = %s may have no effect: %s does not hold %s. Build data "
                "with it, see docs/objectives.md, or leave the weight out",
                *(name, weight, corpus.folder, missing[name]),
            )


def _has_fim(corpus: Corpus) -> bool:
    """Tells if some of the training samples have a document rearranged for infilling."""
    ids = fim_ids(corpus.tokenizer)
    if not ids or remote_files(corpus.folder) is not None:  # a shard may be hours away
        return bool(ids)
    count = min(_LOOKED_AT, corpus.train.num_samples)
    samples = Permutation(corpus.train.num_samples, (0,))(np.arange(count, dtype=np.int64))
    return bool(np.isin(corpus.train.rows(samples), ids).any())


class Combination:
    """Weights of the labels of one step.

    Args:
        weights: of the global batch, by `weight_names`.
        step: steps completed before this one.
    Attributes:
        tokens: labels of the global batch, or their weight, by which its nats are divided; 1 where
            there are none.
    """

    def __init__(self, config: Config, weights: Sequence[float], *, step: int) -> None:
        self._further = further_names(config)
        self._terms = terms_of(config.objectives)
        mtp = config.model.mtp
        self._mus = () if mtp is None else further_weights(config.objectives, mtp, step)
        self._objectives = config.objectives
        self._counts = dict(zip(weight_names(config), weights, strict=True))
        if self._objectives is None:
            # A batch of nothing but prompts may weigh nothing: its loss is 0, not 0 / 0.
            self.tokens = self._learned = self._counts["tokens"] or 1.0
            return
        kinds = [self._counts[kind] for kind in KINDS]
        self.tokens = sum(kinds) or 1.0
        self._lambdas = [getattr(self._objectives, objective_of(kind)) for kind in KINDS]
        # Without those that weigh nothing, so that the others do not depend on their number.
        learned = sum(n for n, weight in zip(kinds, self._lambdas, strict=True) if weight)
        self._learned = learned or 1.0
        self._worth = sum(n * weight for n, weight in zip(kinds, self._lambdas, strict=True))

    @property
    def num_sums(self) -> int:
        """Reported sums of `label_weights` and of further tokens."""
        return (0 if self._objectives is None else len(KINDS)) + len(self._further)

    def nats_scale(self, micro_steps: int) -> float:
        """Factor on a micro-batch's loss, for an engine that takes the mean over `micro_steps`, of
        all data ranks together."""
        return micro_steps / self._learned

    def factor(self, weight: float, count: float) -> float:
        """Factor on each of `count` labels whose mean has that weight in the loss; 0 if none is."""
        return weight * self._learned / count if count else 0.0

    def label_weights(self, micro_batch: Batch) -> LabelWeights:
        """Weights of the labels of a micro-batch, [B, T], with a sum for each of `KINDS`."""
        if self._objectives is None:
            return LabelWeights(micro_batch.get("weights"))
        kinds = micro_batch["kinds"].long()
        counts = [self._count(objective_of(kind)) for kind in KINDS]
        nats = [self.factor(*pair) for pair in zip(self._lambdas, counts, strict=True)]
        squares = None
        if self._objectives.z_loss:
            each = self.factor(self._objectives.z_loss, self._worth)
            squares = torch.tensor([each * weight for weight in self._lambdas])
            squares = squares.to(kinds.device)[kinds]
        of_kinds = torch.tensor(nats).to(kinds.device)
        return LabelWeights(of_kinds[kinds], squares, F.one_hot(kinds, len(KINDS)).float())

    def further_labels(self, micro_batch: Batch, model: Predicts) -> FurtherLabels | None:
        """Further tokens that a micro-batch is to predict; None where the model predicts none."""
        if not self._further:
            return None
        pairs = zip(self._mus, self._further, strict=True)
        return FurtherLabels(
            model,
            following=micro_batch["following"],
            labels=micro_batch["further_labels"],
            factors=[self.factor(weight, self._counts[name]) for weight, name in pairs],
            segment_ids=micro_batch.get("segment_ids"),
        )

    @property
    def num_terms(self) -> int:
        """Terms of a user's."""
        return len(self._terms)

    def terms(self, micro_batch: Batch, head: Scorer) -> UsersTerms | None:
        """Terms of a user's of a micro-batch under the head of the model; None: there are none."""
        if not self._terms:
            return None
        counts = [self._counts[label_of(each)] for each, _ in self._terms]
        weights = [each.weight for each, _ in self._terms]
        factors = [self.factor(*pair) for pair in zip(weights, counts, strict=True)]
        return UsersTerms(self._terms, factors, micro_batch, head)

    def metrics(
        self, nats: Sequence[float], squares: Sequence[float], totals: Sequence[float] = ()
    ) -> dict[str, float]:
        """Metrics of a step, from the reported sums over the global batch: of the labels of each of
        `KINDS` under `objectives`, of each further token, and of each term of a user's."""
        first = len(nats) - len(self._further)
        sums = dict(zip(self._further, nats[first:], strict=True))
        further = {name: sums[name] / self._counts[name] for name in sums if self._counts[name]}
        named = {member_name("objective/*/loss", name): mean for name, mean in further.items()}
        if self._objectives is None:
            return named
        of_kind = dict(zip(KINDS, nats[:first], strict=True))
        of_kind["fim"] += of_kind["fim_middle"]
        means = {name: of_kind[name] / self._count(name) for name in KINDS if self._count(name)}
        total = sum(
            getattr(self._objectives, name) * mean
            for name, mean in means.items()
            if name == objective_of(name)
        )
        metrics = {member_name("objective/*/loss", name): mean for name, mean in means.items()}
        if self._objectives.z_loss:
            square = sum(a * b for a, b in zip(self._lambdas, squares[:first], strict=True))
            metrics["objective/z_loss"] = square / (self._worth or 1.0)
            total += self._objectives.z_loss * metrics["objective/z_loss"]
        for (each, _), sum_ in zip(self._terms, totals, strict=True):
            if count := self._counts[label_of(each)]:
                named[member_name("objective/*/loss", each.label)] = sum_ / count
                total += each.weight * sum_ / count
        mus = dict(zip(self._further, self._mus, strict=True))
        total += sum(mus[name] * mean for name, mean in further.items())
        return metrics | named | {"objective/total": total}

    def _count(self, name: str) -> float:
        """Labels of an objective, or of the middles alone, in the global batch."""
        middles = self._counts["fim_middle"] if name == "fim" else 0.0
        return self._counts[name] + middles

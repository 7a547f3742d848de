"""Training of tiny Hugging Face models in any layout, and by plain torch for comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.checkpoint.fragments import Span
from cdrmix.checkpoint.weight_source import WeightSource
from cdrmix.config.hugging_face import sizes_of_folder
from cdrmix.config.objectives import OF_TOKENS
from cdrmix.config.schema import Config
from cdrmix.data.document import KINDS
from cdrmix.objectives.language_model import sum_weights
from cdrmix.planning.cluster import processes
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose

STEPS, GLOBAL_BATCH, LENGTH = 4, 4, 24
# Sharper than that of a real model, so that a balance summed over all layers would show.
LOAD_BALANCE_WEIGHT = 0.1
CLIPPING = 0.5
OBJECTIVES = {"text": 1.0, "fim": 0.5, "prompt": 0.0, "thought": 2.0, "answer": 1.5, "z_loss": 0.1}


@dataclass(frozen=True)
class Case:
    """One family in one layout.

    Attributes:
        family: as `hf_models.make_folder` names it.
        profile: DeepSpeed profile.
        recompute: layers run again in the backward pass.
        precision: of the run.
        zero: changes of the profile's `zero_optimization`.
        objectives: whether the loss has parts of their own means, and a z-loss.
        broken: fault to plant, by name.
        optimizer: its kind.
    """

    family: str
    profile: str = "zero2"
    recompute: bool = False
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    objectives: bool = False
    broken: str = ""
    optimizer: str = "adamw"

    def __str__(self) -> str:
        parts = [self.family, self.profile, "recomputed" if self.recompute else ""]
        parts += ["objectives" if self.objectives else ""]
        return " ".join(filter(None, [*parts, "" if self.precision == "fp32" else self.precision]))


class LoadedWeights(WeightSource):
    """Weights as transformers' own reader gives them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._values = loaded(folder).state_dict()
        tied = loaded(folder).config.tie_word_embeddings
        if tied:
            del self._values["lm_head.weight"]

    def names(self) -> list[str]:
        return list(self._values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._values[name].shape)

    def read(self, name: str, span: Span) -> Tensor:
        assert not any(span.block.offset), "data ranks hold whole tensors"
        return self._values[name].reshape(-1)[span.start : span.start + span.numel]


def loaded(folder: Path) -> Any:
    """The model of a folder, by transformers' own reader, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def make_config(case: Case, folder: Path) -> Config:
    """Configuration of a run from a folder."""
    has_experts = "moe" in sizes_of_folder(folder)
    experts = {"moe": {"load_balance_weight": LOAD_BALANCE_WEIGHT}} if has_experts else {}
    training = {
        "max_steps": STEPS,
        "global_batch_size": GLOBAL_BATCH,
        "sequence_length": LENGTH,
        "precision": case.precision,
        "learning_rate": 3e-3,
        "min_learning_rate": 1e-3,
        "warmup_steps": 2,
        "gradient_clipping": CLIPPING,
        "epsilon": 1e-6,  # see tests/layouts.py
        "activation_checkpointing": "block" if case.recompute else "none",
    }
    return Config(
        name="hugging-face",
        model={"kind": "hf", "path": str(folder), **experts},
        training=training,
        optimizer={"kind": case.optimizer},
        data={"path": "none", "segment_documents": True},
        objectives=OBJECTIVES if case.objectives else None,
    )


def make_plan(case: Case, config: Config, world_size: int) -> Plan:
    """Plan of a case, whose small parameters are partitioned as well."""
    import json
    import tempfile

    from cdrmix.planning.deepspeed_json import profile_path, read_profile

    settings = read_profile(profile_path(case.profile))
    settings["zero_optimization"] |= case.zero
    if settings["zero_optimization"]["stage"] == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(settings))
        file.flush()
        return choose(config, processes(world_size), profile=file.name)


def global_batch(step: int, vocabulary: int, *, has_kinds: bool = False) -> dict[str, Tensor]:
    """Rows of a step with some documents in each; ranks have different numbers of them.

    With kinds, those of their labels, as objectives need them.
    """
    source = torch.Generator().manual_seed(step)
    ids = torch.randint(3, vocabulary, (GLOBAL_BATCH, LENGTH + 1), generator=source)
    starts = torch.zeros(GLOBAL_BATCH, LENGTH, dtype=torch.bool)
    for row in range(GLOBAL_BATCH):
        starts[row, torch.randperm(LENGTH, generator=source)[: row + step % 2]] = True
    segments = starts.cumsum(1)
    labels = ids[:, 1:].clone()
    # the first token of a document is not predicted
    labels[:, :-1][segments[:, 1:] != segments[:, :-1]] = -100
    batch = {"input_ids": ids[:, :-1], "labels": labels, "segment_ids": segments}
    if has_kinds:
        batch["kinds"] = (segments * torch.arange(1, GLOBAL_BATCH + 1)[:, None] % len(KINDS)).byte()
    return batch


@dataclass(frozen=True)
class Started:
    """An engine of a case on this rank."""

    config: Config
    plan: Plan
    topology: Any
    engine: Any


def start(case: Case, folder: Path) -> Started:
    """This rank's engine with the weights of the folder; its process group is there."""
    from cdrmix.checkpoint import engine_state
    from cdrmix.engines.loop import start_engine
    from cdrmix.hf.family_check import check_family
    from cdrmix.parallel.apply import build_model, logical_name_in
    from cdrmix.parallel.topology import make_topology

    config = make_config(case, folder)
    plan = make_plan(case, config, runtime.world_size())
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    engine_state.load_weights(engine, LoadedWeights(folder), logical_name_in(config.model))
    check_family(engine.module)
    return Started(config, plan, topology, engine)


def run_steps(started: Started, *, first: int = 0, count: int = STEPS) -> list[tuple[float, float]]:
    """Loss and gradient norm of some steps, over all ranks."""
    from cdrmix.engines.combination import own_weights
    from cdrmix.engines.training_step import train_step

    config, topology, engine = started.config, started.topology, started.engine
    found = []
    for step in range(first, first + count):
        rows = global_batch(step, config.model.vocab_size, has_kinds=config.objectives is not None)
        weights = own_weights(rows, config)
        batch = {}
        for name, values in rows.items():
            by_reader = values.view(-1, runtime.world_size(), started.plan.micro_batch_size, LENGTH)
            batch[name] = by_reader[:, topology.sample_rank]
        result = train_step(engine, config, topology, batch, step=step, weights=weights)
        loss = float(runtime.all_reduce_sum(result.nats.double())) / sum(weights)
        found.append((loss, float(engine.get_global_grad_norm())))
    return found


def plain_steps(folder: Path, config: Config, *, count: int = STEPS) -> list[tuple[float, float]]:
    """Loss and gradient norm of some steps by plain torch, document by document."""
    from cdrmix.optimizers.schedule import learning_rate

    model = loaded(folder)
    training = config.training
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )
    found = []
    for step in range(count):
        batch = global_batch(step, config.model.vocab_size, has_kinds=config.objectives is not None)
        learned, nats, balance = _plain_loss(model, batch, config)
        valid = float(sum_weights(batch["labels"]))
        (learned + balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        optimizer.zero_grad()
        found.append((nats.item() / valid, float(norm)))
    return found


def _plain_weights(batch: dict[str, Tensor], config: Config) -> tuple[Tensor, Tensor]:
    """Weights of the nats of each label, and of the square of its softmax's denominator."""
    valid = batch["labels"] != -100
    objectives = config.objectives
    if objectives is None:
        return valid / valid.sum(), torch.zeros(valid.shape)
    nats, learned = torch.zeros(2, *valid.shape)
    for name in OF_TOKENS:
        kinds = ("fim", "fim_middle") if name == "fim" else (name,)
        of_part = torch.tensor([KINDS.index(kind) for kind in kinds])
        here = valid & torch.isin(batch["kinds"].long(), of_part)
        weight = getattr(objectives, name)
        nats += weight * here / here.sum().clamp(min=1)
        learned += weight * here
    return nats, objectives.z_loss * learned / learned.sum()


def _plain_loss(
    model: Any, batch: dict[str, Tensor], config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of the labels, summed nats, and the weighted load-balance loss, mean over layers."""
    moe = config.model.moe
    learned, nats = torch.zeros(2)
    weights = torch.stack(_plain_weights(batch, config))
    scores: list[list[Tensor]] = []  # router logits by document, then by layer
    rows = (batch[name] for name in ("input_ids", "labels", "segment_ids"))
    for row, (ids, labels, segments) in enumerate(zip(*rows, strict=True)):
        for document in segments.unique():
            here = segments == document
            options = {"output_router_logits": True} if moe else {}
            output = model(ids[here][None], use_cache=False, **options)
            each = F.cross_entropy(output.logits[0], labels[here], reduction="none")
            squares = output.logits[0].logsumexp(-1).square()
            nats = nats + each.sum().detach()
            learned = learned + (weights[:, row, here] * torch.stack([each, squares])).sum()
            scores.append(
                [layer.reshape(-1, layer.shape[-1]) for layer in output.router_logits or ()]
                if moe
                else []
            )
    losses = []
    for logits in map(torch.cat, zip(*scores, strict=True)):
        assert moe is not None, "a dense model has no routers"
        if config.model.path and "nemotron" in config.model.path:
            probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            correction = next(v for n, v in model.named_buffers() if "e_score_correction" in n)
            chosen = (logits.sigmoid() + correction).topk(moe.top_k).indices
        else:
            probabilities = logits.softmax(-1)
            chosen = logits.topk(moe.top_k).indices
        share = F.one_hot(chosen, moe.num_experts).sum((0, 1)) / chosen.numel()
        losses.append(moe.num_experts * (share * probabilities.mean(0)).sum())
    balance = torch.stack(losses).mean() * moe.load_balance_weight if moe and losses else 0 * nats
    return learned, nats, balance

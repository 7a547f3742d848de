"""Multi-token prediction: its parts, its loss, and greedy decoding that guesses ahead."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.data.loader import next_targets, split_documents
from cdrmix.engines.combination import (
    Combination,
    own_weights,
    weight_names,
    with_further_labels,
)
from cdrmix.engines.further_labels import FurtherLabels
from cdrmix.engines.training_step import StepResult, train_step
from cdrmix.errors import ConfigError
from cdrmix.hf.model import head_losses
from cdrmix.models.backbone import Backbone
from cdrmix.models.generate import generate
from cdrmix.models.mtp import LinearHead
from cdrmix.models.speculate import speculate
from cdrmix.objectives import language_model
from cdrmix.objectives.language_model import ALL_ALIKE, LabelWeights
from cdrmix.parallel.topology import ALONE
from cdrmix.planning.counts import parameters
from tests.conftest import TINY
from tests.parity.test_training_loss import Engine

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"kind": "independent", "num_tokens": 4},
    "block": {"kind": "independent", "num_tokens": 3, "head": "block"},
    "deepseek": {"kind": "deepseek", "num_tokens": 4},
}
MOE5B_TINY = shipped("model_configs") / "cdrmix-moe5b-tiny.yaml"
EOS = 0
MODULUS = 31


def made(
    mtp: dict[str, Any] | None, *, awake: bool = True, seed: int = 3, **changes: Any
) -> Backbone:
    """A small model; `awake`: with numbers where training begins with zeros."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 1, "vocab_size": 256}
    values = {**sizes, "transformer_fraction": 0.5, "mtp": mtp, **changes}
    model = Backbone(ModelConfig.model_validate(values))
    model.initialize(seed=seed)
    if awake:
        for name, parameter in model.named_parameters():
            if not parameter.any():
                source = torch.Generator().manual_seed(len(name))
                torch.nn.init.normal_(parameter, std=0.2, generator=source)
    return model


def configured(model: Backbone, objectives: dict[str, Any] | None = None) -> Config:
    values = load_config(TINY).model_dump() | {"objectives": objectives}
    return Config.model_validate(values | {"model": model.config.model_dump()})


def packed_batch(num_targets: int, *, seed: int = 5, length: int = 24) -> dict[str, Tensor]:
    """Two micro-batches of documents kept apart, [A, B, T], as the loader gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 50, (2, 2, length + 1), generator=generator).numpy()
    rows[..., 5] = rows[..., 13] = rows[..., 14] = EOS
    labels, segment_ids = split_documents(rows, EOS)
    batch = {"input_ids": rows[..., :-1], "labels": labels, "segment_ids": segment_ids}
    batch["targets"] = next_targets(rows, labels, num_targets, EOS)
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def step(
    model: Backbone, batch: dict[str, Tensor], objectives: dict[str, Any] | None = None
) -> tuple[StepResult, Engine]:
    """One step without an optimizer: gradients are left in the model."""
    config = configured(model, objectives)
    batch = with_further_labels(batch, config)
    engine = Engine(model, len(batch["labels"]))
    weights = own_weights(batch, config)
    return train_step(engine, config, ALONE, batch, step=0, weights=weights), engine


def gradients(model: Backbone) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_change_no_initial_value_and_no_output_of_the_trunk(kind: str) -> None:
    plain, model = made(None, awake=False), made(KINDS[kind], awake=False)
    trunk = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert name.startswith("mtp.") or torch.equal(parameter, trunk.pop(name))
    assert not trunk
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(model(ids).hidden, plain(ids).hidden)
    assert {p.name: p.shape for p in parameters(model.config)} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }


def test_a_linear_head_gives_the_trunk_no_gradient_at_first() -> None:
    found = []
    for mtp in (None, KINDS["linear"]):
        model = made(mtp, awake=False)
        step(model, packed_batch(4))
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert found[1]["mtp.2.map.weight"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objectives", [None, {}], ids=["one mean", "objectives"])
def test_weights_of_zero_are_no_further_tokens_bit_by_bit(
    kind: str, objectives: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "chunk_positions", lambda *_: 20)  # not a divisor of 48
    batch = packed_batch(KINDS[kind]["num_tokens"])
    kinds = torch.zeros_like(batch["labels"], dtype=torch.uint8)
    zeros = [0.0] * (KINDS[kind]["num_tokens"] - 1)
    found = []
    for mtp, more in ((None, {}), (KINDS[kind], {"mtp": zeros})):
        model = made(mtp)
        of_run = None if objectives is None and mtp is None else {**(objectives or {}), **more}
        kept = batch | ({} if of_run is None else {"kinds": kinds})
        result, engine = step(model, kept, of_run)
        found.append((result, engine.objective, gradients(model)))
    (plain, loss, trunk), (_, found_loss, all_gradients) = found
    assert found_loss == loss and plain.nats > 0
    assert all(torch.equal(all_gradients[name], trunk[name]) for name in trunk)
    heads = [value for name, value in all_gradients.items() if name.startswith("mtp.")]
    assert heads and not any(value.any() for value in heads)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_a_sum_of_means_over_labels_of_their_own(kind: str) -> None:
    model, mtp = made(KINDS[kind]), KINDS[kind]
    batch = packed_batch(mtp["num_tokens"])
    batch["labels"][0, 0, 3:9] = -100  # fewer than further ones
    weights = [0.7, 0.4, 0.1][: mtp["num_tokens"] - 1]
    batch["kinds"] = torch.zeros_like(batch["labels"], dtype=torch.uint8)
    result, engine = step(model, batch, {"mtp": weights})
    found = gradients(model)
    model.zero_grad()
    total = torch.zeros(())
    means = []
    for place, mu in enumerate((1.0, *weights)):
        nats, count = torch.zeros(()), 0
        for ids, targets, documents, labels in zip(
            *(batch[name] for name in ("input_ids", "targets", "segment_ids", "labels")),
            strict=True,
        ):
            hidden = model(ids, segment_ids=documents).hidden
            assert model.mtp is not None
            heads = [hidden, *model.mtp(hidden, targets, model.embedding, documents)]
            of_place = labels if place == 0 else targets[..., place]
            logits = model.logits(heads[place]).flatten(0, 1)
            nats = nats + F.cross_entropy(logits, of_place.flatten(), reduction="sum")
            count += int((of_place >= 0).sum())
        means.append(nats / count)
        total = total + mu * means[-1]
    total.backward()
    torch.testing.assert_close(torch.tensor(engine.objective), total.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        expected = parameter.grad
        assert expected is not None
        assert (found[name] - expected).norm() <= 1e-5 * expected.norm().clamp(min=1e-4), name
    half = len(result.parts) // 2
    metrics = result.combination.metrics(result.parts[:half].tolist(), [0.0] * half)
    for place, mean in enumerate(means[1:], 2):
        assert metrics[f"objective/mtp_{place}/loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert metrics["objective/total"] == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crosses_from_a_document_to_the_next(kind: str) -> None:
    model, mtp = made(KINDS[kind]), KINDS[kind]
    assert model.mtp is not None
    batch = {name: value[0] for name, value in packed_batch(mtp["num_tokens"]).items()}
    outs = []
    for other in (0, 1):  # another last document
        ids, targets = batch["input_ids"].clone(), batch["targets"].clone()
        ids[:, 15:] = (ids[:, 15:] + other) % 50
        is_last = batch["segment_ids"] == 3
        targets[is_last] = torch.where(targets[is_last] < 0, -100, targets[is_last] + other)
        hidden = model(ids, segment_ids=batch["segment_ids"]).hidden
        outs.append(model.mtp(hidden, targets, model.embedding, batch["segment_ids"]))
    for place, (first, second) in enumerate(zip(*outs, strict=True), 1):
        counts = batch["targets"][..., place] >= 0
        changed = (first != second).any(-1)
        assert not changed[:, :15].logical_and(counts[:, :15]).any()
        assert changed[:, 15:].any()
    # By their definition: a target is a token of the same document.
    rows, documents = batch["input_ids"], batch["segment_ids"]
    for ahead in range(1, mtp["num_tokens"]):
        same = documents[:, ahead:] == documents[:, :-ahead]
        expected = torch.where(same, rows[:, ahead:], -100)
        found = batch["targets"][:, :-ahead, ahead - 1]
        assert torch.equal(found, expected)


def test_depths_read_the_tokens_of_the_sample_where_documents_are_not_apart() -> None:
    model = made(KINDS["deepseek"])
    assert model.mtp is not None
    eos, rows = 9, torch.randint(10, 50, (1, 1, 25), generator=torch.Generator().manual_seed(1))
    rows[..., 6] = rows[..., 15] = eos
    labels = rows[..., 1:]
    targets = torch.from_numpy(next_targets(rows.numpy(), labels.numpy(), 4, eos))
    whole = {"input_ids": rows[..., :-1], "labels": labels, "targets": targets}
    batch = {
        name: value[0] for name, value in with_further_labels(whole, configured(model)).items()
    }
    hidden = model(batch["input_ids"]).hidden

    def of_depths(following: Tensor, nowhere: float) -> list[Tensor]:
        """What the head is to score, the embedding of token 0 raised: no sample holds it."""
        assert model.mtp is not None
        row = torch.zeros(len(model.embedding.weight), 1)
        row[0] = nowhere
        return model.mtp(
            hidden, following, lambda ids: F.embedding(ids, model.embedding.weight + row), None
        )

    def touched(following: Tensor) -> list[Tensor]:
        """Positions of each depth at which that token counts though there is a target."""
        pairs = zip(of_depths(following, 0.0), of_depths(following, 1.0), strict=True)
        counts = (batch["further_labels"] >= 0).unbind(-1)
        return [(a != b).any(-1) & c for (a, b), c in zip(pairs, counts, strict=True)]

    assert not any(each.any() for each in touched(batch["following"]))
    assert any(each.any() for each in touched(targets[0])), "a control: borders read as token 0"


def test_tokens_that_weigh_nothing_are_no_further_labels() -> None:
    model = made(KINDS["linear"])
    batch = packed_batch(4)
    batch["weights"] = torch.ones(batch["labels"].shape)
    batch["weights"][..., 8:12] = 0  # labels: tokens 9 to 12
    labels = with_further_labels(batch, configured(model))["further_labels"]
    place = torch.arange(24).unsqueeze(1) + torch.arange(2, 5)  # of the token that is predicted
    unlearned = (place >= 9) & (place <= 12)
    assert (labels[..., unlearned] == -100).all()
    assert torch.equal(labels[..., ~unlearned], batch["targets"][..., 1:][..., ~unlearned])


class Peak(TorchDispatchMode):
    """Highest number of bytes that tensors made under it hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in self._known:
                storage = leaf.untyped_storage()
                size, key = storage.nbytes(), storage._cdata
                if key not in self._known:
                    self._known.add(key)
                    self.now += size
                    weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize("together", [True, False], ids=["one call", "a call for each head"])
def test_heads_take_no_memory_of_the_size_of_the_vocabulary(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "chunk_positions", lambda *_: 32)
    peaks = {}
    for num_tokens in (1, 4):
        mtp = None if num_tokens == 1 else {"num_tokens": num_tokens}
        model = made(mtp, vocab_size=50_000)
        hidden = torch.randn(1, 64, 32, requires_grad=True)
        labels = torch.randint(0, 50_000, (1, 64))
        targets = labels.unsqueeze(-1).expand(-1, -1, 4)
        further = FurtherLabels(model, targets, targets[..., 1:], [0.5] * 3, None)
        with Peak() as peak:
            if num_tokens == 1 or not together:
                loss = torch.zeros(())
                for _ in range(num_tokens):
                    of_head = language_model.linear_losses(hidden, model.embedding.weight, labels)
                    loss = loss + of_head.loss
            else:
                loss = further.losses(hidden, labels, ALL_ALIKE).loss
            loss.backward()
        peaks[num_tokens] = peak.peak
    assert (peaks[4] <= 1.15 * peaks[1]) == together, peaks


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_step_by_step_is_the_training_pass(kind: str) -> None:
    model = made(KINDS[kind])
    further = model.mtp
    assert further is not None
    ids = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
    num_tokens = KINDS[kind]["num_tokens"]
    targets = torch.stack(
        [F.pad(ids[:, k:], (0, k), value=-100) for k in range(1, num_tokens + 1)], -1
    )
    with torch.no_grad():
        hidden = model(ids).hidden
        expected = further(hidden, targets, model.embedding, None)
        states = further.start_drafting()
        known = 0
        for number in (2, 1, 3, 1, 1, 4):
            for is_right in (False, True):  # wrong guesses leave nothing behind
                seen: list[Tensor] = []

                def choose(
                    scored: Tensor,
                    seen: Any = seen,
                    end: int = known + number,
                    right: Any = is_right,
                ) -> Tensor:
                    seen.append(scored)
                    return ids[:, end + len(seen)] if right else torch.full((3,), 7)

                end = known + number
                inputs = (hidden[:, known:end], ids[:, known + 1 : end + 1])
                _, after = further.draft(*inputs, states, choose, model.embedding)
                if not is_right:
                    wrong = after
            for place, scored in enumerate(seen):
                torch.testing.assert_close(scored, expected[place][:, end - 1], atol=1e-5, rtol=0)
            # Those after wrong guesses go on.
            states, known = wrong, end


def counting(rows: int, length: int, *, seed: int) -> Tensor:
    """Rows that count up by a step of their own: the token before tells little of the next one."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, MODULUS, (rows, 1), generator=generator)
    steps = torch.randint(1, 4, (rows, 1), generator=generator)
    return (first + steps * torch.arange(length)) % MODULUS


def accuracy_of_counts(tokens: Tensor, ahead: int) -> float:
    """Accuracy of the likeliest token `ahead`, by the token alone: a bigram model at its best."""
    pairs = torch.zeros(MODULUS, MODULUS)
    here, there = tokens[:, :-ahead].flatten(), tokens[:, ahead:].flatten()
    pairs.index_put_((here, there), torch.ones(len(here)), accumulate=True)
    return float(pairs.max(1).values.sum() / pairs.sum())


@pytest.fixture(scope="module", params=["linear", "deepseek"])
def trained(request: pytest.FixtureRequest) -> tuple[Backbone, str]:
    """A model that counts, trained in 150 steps."""
    torch.manual_seed(0)
    mtp = KINDS[request.param] | {"num_tokens": 3}
    model = made(mtp, awake=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(150):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (number + 1) / 10, (150 - number) / 60)
        ids = counting(16, 14, seed=number)
        targets = next_targets(ids.numpy(), ids[:, 1:].numpy(), 3, eos_id=255)
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        batch["targets"] = torch.from_numpy(targets)
        step(model, {name: value.unsqueeze(0) for name, value in batch.items()})
        optimizer.step()
        optimizer.zero_grad()
    return model, request.param


def test_the_second_token_is_foretold_better_than_by_the_one_before(
    trained: tuple[Backbone, str],
) -> None:
    model, _ = trained
    assert model.mtp is not None
    ids = counting(100, 14, seed=1000)
    targets = torch.stack([F.pad(ids[:, k:], (0, k), value=-100) for k in (1, 2, 3)], -1)
    with torch.no_grad():
        hidden = model(ids).hidden
        second = model.logits(model.mtp(hidden, targets, model.embedding, None)[0]).argmax(-1)
    right = float((second[:, 2:-2] == ids[:, 4:]).float().mean())
    by_the_token_alone = accuracy_of_counts(ids, 2)
    assert by_the_token_alone < 0.5
    assert right > by_the_token_alone + 0.3


def test_guessing_ahead_gives_the_text_of_plain_decoding(trained: tuple[Backbone, str]) -> None:
    model, kind = trained
    prompts = counting(200, 4, seed=2000)
    stop = 11
    plain = generate(model, prompts, max_new_tokens=16, temperature=0, seed=0, stop_id=stop)
    found = speculate(model, prompts, max_new_tokens=16, stop_id=stop)
    assert torch.equal(found.tokens, plain)
    ended = (plain == stop).cumsum(1).cumsum(1) > 1
    assert found.num_tokens == int((~ended).sum())
    assert found.tokens_per_pass > 1.5 and found.acceptance[0] > 0.6, found
    # Parts that have learned nothing: the same text, and few guesses that hold.
    values = {name: p for name, p in model.named_parameters() if not name.startswith("mtp.")}
    held = []
    for seed in (5, 6, 7):
        fresh = made(KINDS[kind] | {"num_tokens": 3}, awake=False, seed=seed)
        fresh.load_state_dict(values, strict=False)
        found = speculate(fresh, prompts, max_new_tokens=16, stop_id=stop)
        assert torch.equal(found.tokens, plain)
        held.append(max(found.acceptance))
    assert sum(held) / len(held) < 0.05, held


def test_states_of_every_block_type_are_kept_where_guesses_were_wrong() -> None:
    """Mamba, attention and experts, and blocks that keep another number of tokens in each row."""
    config = load_config(MOE5B_TINY, ["model.vocab_size=512"])
    model = Backbone(config.model)
    model.initialize(seed=0)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=source))
    prompts = torch.randint(0, 512, (6, 7), generator=source)
    plain = generate(model, prompts, max_new_tokens=24, temperature=0, seed=0)
    found = speculate(model, prompts, max_new_tokens=24)
    assert torch.equal(found.tokens, plain)
    assert len({tuple(row) for row in plain.tolist()}) == 6


def test_the_text_ends_where_it_is_told() -> None:
    model = made(KINDS["deepseek"])
    prompts = counting(5, 3, seed=1)
    for number in (0, 1, 2, 3):
        plain = generate(model, prompts, max_new_tokens=number, temperature=0, seed=0)
        found = speculate(model, prompts, max_new_tokens=number)
        assert found.tokens.shape == (5, number) and torch.equal(found.tokens, plain)
    with pytest.raises(ValueError, match="at least one token"):
        speculate(model, prompts[:, :0], max_new_tokens=1)


def test_weights_of_a_step_follow_the_section() -> None:
    model = made(KINDS["linear"])
    assert Combination(configured(model), [1.0] * 4, step=0)._mus == (0.5, 0.3, 0.2)
    deepseek = made(KINDS["deepseek"])
    assert Combination(configured(deepseek), [1.0] * 4, step=0)._mus == (0.3 / 3,) * 3
    late = {"mtp": [1, 1, 1], "late_mtp": [0.1, 0.1, 0.1], "late_mtp_step": 5}
    config = configured(model, late)
    counts = [1.0] * len(weight_names(config))
    assert Combination(config, counts, step=3)._mus == (1, 1, 1)
    assert Combination(config, counts, step=4)._mus == (0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.mtp.num_tokens=257"], "num_tokens = 257 is more than training.sequence_length"),
        (["objectives.mtp=[1]"], "model.mtp is null"),
        (["model.mtp.num_tokens=4", "objectives.mtp=[1]"], "has 1 weights for the 3 tokens"),
        (["model.mtp={kind: deepseek, head: block}"], "is for kind = independent"),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(TINY, overrides)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_part_is_weighed_as_the_first_head_alone() -> None:
    """Reported sums of the next token are behind no other head's."""
    model = made(KINDS["linear"])
    assert model.mtp is not None and all(isinstance(p, LinearHead) for p in model.mtp.values())
    labels = torch.randint(0, 256, (2, 8))
    targets = labels.unsqueeze(-1).expand(-1, -1, 4)
    hidden = torch.randn(2, 8, 32)
    weights = LabelWeights(torch.rand(2, 8), torch.rand(2, 8), torch.rand(2, 8, 3))
    further = FurtherLabels(model, targets, targets[..., 1:], [0.0] * 3, None)
    with torch.no_grad():
        found = further.losses(hidden, labels, weights)
        alone = head_losses(hidden, model.embedding.weight, labels, weights)
    assert torch.equal(found.loss, alone.loss)
    torch.testing.assert_close(found.nats[:3], alone.nats)
    torch.testing.assert_close(found.squares[:3], alone.squares)
    assert len(found.nats) == 6

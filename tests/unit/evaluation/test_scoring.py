"""Scores and continuations: equal in batches of any size, with draws of their own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import DataError
from cdrmix.evaluation import scoring
from cdrmix.evaluation.scoring import Prompt, Sampling, Scorer
from cdrmix.evaluation.trained import TrainedModel, load_trained
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.models.backbone import Backbone, LanguageModel
from tests.hf_models import config_of
from tests.made_run import made_run

LENGTH, VOCABULARY = 64, 320
# A hybrid with experts; two kinds of Mamba; blocks that take a part of the tokens.
EXPERTS = {"num_experts": 4, "expert_hidden_size": 48}
MIXERS = ["mamba", "rwkv", "routing_mamba", "transformer"]
KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {"transformer_fraction": 0.5, "moe": EXPERTS},
    "mamba": {"mixers": MIXERS, "mamba": {}, "routing_mamba": {"num_experts": 4}},
    "depths": {"transformer_fraction": 0.5, "moe": EXPERTS, "mod": {"capacity": 0.5}},
}
FAMILIES = ("llama", "mistral", "mixtral", "nemotron_h")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A run of random weights with opinions."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    made_run(folder, "model.init_std_scale=4")
    return load_trained(folder)


def of_kind(kind: str) -> LanguageModel:
    """A model of random weights, ours or of a Hugging Face family."""
    if kind in FAMILIES:
        return hugging_face(kind)
    sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 2, "vocab_size": VOCABULARY}
    model = Backbone(ModelConfig(**{**sizes, "moe": None, **KINDS[kind]}))
    model.initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.embedding_norm.weight.mul_(0.3)  # or the tied head would repeat the last token
    return model.eval()


def scorer(run: TrainedModel, batch_size: int) -> Scorer:
    return Scorer(run.model, run.tokenizer, LENGTH, batch_size)


def hugging_face(family: str) -> HuggingFaceModel:
    torch.manual_seed(0)
    settings = config_of(family, vocab_size=VOCABULARY, tied=False)
    causal = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 1, "vocab_size": VOCABULARY}
    return HuggingFaceModel(causal.eval(), ModelConfig(**sizes, moe=None))


def prompts_of(lengths: list[int]) -> list[Prompt]:
    return [
        Prompt([0, *(20 + (7 * i + 3 * t) % 250 for t in range(n))], str(i))
        for i, n in enumerate(lengths)
    ]


def written(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    batch_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Tensor]:
    """Log-probabilities, [tokens, V], from which each prompt's new tokens were chosen."""
    found: list[list[Tensor]] = [[] for _ in prompts]
    rows: list[list[int]] = []
    original = Scorer._continue
    choose = scoring._chosen

    def watched(self: Scorer, inputs: list[list[int]], *rest: object, **options: object) -> object:
        rows[:] = [*inputs]
        passes.clear()
        done = original(self, inputs, *rest, **options)
        first = self._first_tokens(inputs)
        for row, (tokens, new) in enumerate(zip(inputs, done, strict=True)):
            place = next(i for i, prompt in enumerate(prompts) if prompt.tokens == tokens)
            begin = len(tokens) - first
            found[place] = [each[row] for each in passes[begin : begin + new.num_tokens]]
        return done

    def noted(logits: Tensor, *rest: object) -> list[int]:
        passes.append(logits.log_softmax(-1))
        return choose(logits, *rest)

    passes: list[Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "_continue", watched)
        patch.setattr(scoring, "_chosen", noted)
        Scorer(model, tokenizer, LENGTH, batch_size).continue_prompts(
            prompts, Sampling(max_new_tokens=6)
        )
    return [torch.stack(each) for each in found]


@pytest.mark.parametrize("kind", [*KINDS, *FAMILIES])
def test_prompts_of_unequal_length_are_continued_alike_in_any_batch(
    kind: str, run: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = of_kind(kind), run.tokenizer
    prompts = prompts_of([3, 12, 1, 7, 12, 17, 5, 2])
    alone, together = (written(model, tokenizer, prompts, n, monkeypatch) for n in (1, 8))
    for one, other in zip(alone, together, strict=True):
        assert one.argmax(-1).tolist() == other.argmax(-1).tolist()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    # a control: padding that state, token shift and cache see
    longest = max(len(prompt.tokens) for prompt in prompts)
    padded = [
        Prompt([tokenizer.pad_id] * (longest - len(prompt.tokens)) + prompt.tokens)
        for prompt in prompts
    ]
    seen = written(model, tokenizer, padded, 8, monkeypatch)
    assert max(float((a[0] - b[0]).abs().max()) for a, b in zip(alone, seen, strict=True)) > 1e-2


def test_the_size_of_a_batch_changes_no_score(run: TrainedModel) -> None:
    pairs = [([0, *range(20, 22 + 3 * i)], [40 + i] * (1 + i % 4)) for i in range(9)]
    alone, together = (scorer(run, size).score(pairs) for size in (1, 9))
    nats = [torch.tensor([nats for nats, _ in each]) for each in (alone, together)]
    torch.testing.assert_close(nats[0], nats[1], rtol=0, atol=1e-5)
    assert [greedy for _, greedy in alone] == [greedy for _, greedy in together]


def test_draws_depend_on_seed_key_and_sample_alone(run: TrainedModel) -> None:
    sampling = Sampling(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=3)
    prompts = [Prompt([0, 29, *range(30, 30 + n)], f"task {n}", 1) for n in (5, 0, 9, 2)]
    one, many = (scorer(run, n).continue_prompts(prompts, sampling) for n in (1, 4))
    assert one == many
    backwards = scorer(run, 3).continue_prompts(prompts[::-1], sampling)
    assert backwards[::-1] == one
    others = [prompts[0]._replace(sample=2), prompts[0]._replace(key="other")]
    others_seed = Sampling(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=4)
    found = {
        one[0].text,
        *(each.text for each in scorer(run, 2).continue_prompts(others, sampling)),
    }
    found.add(scorer(run, 1).continue_prompts(prompts[:1], others_seed)[0].text)
    assert len(found) == 4, "each draws numbers of its own"


def test_tokens_are_drawn_by_their_share_of_the_nucleus() -> None:
    shares = torch.tensor([0.1, 0.45, 0.05, 0.4])
    logits = shares.log().expand(1, -1)
    numbers = [(i + 0.5) / 400 for i in range(400)]

    def drawn(**options: float) -> dict[int, float]:
        sampling = Sampling(max_new_tokens=1, **{"temperature": 1.0, **options})
        tokens = [scoring._chosen(logits, sampling, [number])[0] for number in numbers]
        return {token: n / 400 for token, n in sorted(Counter(tokens).items())}

    assert drawn() == pytest.approx({0: 0.1, 1: 0.45, 2: 0.05, 3: 0.4}, abs=0.01)
    # 0.45 alone do not reach 0.8, with 0.4 they do; the token of 0.1 is left out
    assert drawn(top_p=0.8) == pytest.approx({1: 0.45 / 0.85, 3: 0.4 / 0.85}, abs=0.01)
    assert drawn(top_p=1e-9) == {1: 1.0}
    squares = (shares**2 / (shares**2).sum()).tolist()
    assert drawn(temperature=0.5) == pytest.approx(dict(enumerate(squares)), abs=0.01)
    assert drawn(temperature=0.0) == {1: 1.0}


def test_a_score_is_the_sum_over_the_continuation(
    run: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, new = [0, 30, 31], [32, 33]
    with torch.no_grad():
        logits = run.model.logits(run.model(torch.tensor([context + new])).hidden)[0]
    expected = logits.log_softmax(-1)[[2, 3], [32, 33]].sum()
    [(nats, greedy)] = scorer(run, 2).score([(context, new)])
    assert nats == pytest.approx(float(expected), abs=1e-5)
    assert not greedy
    best = [int(logits[2].argmax())]
    assert scorer(run, 2).score([(context, best)])[0][1]
    # the head reads positions in pieces, across rows
    pairs = [(context, new * n) for n in (1, 4, 2)]
    whole = scorer(run, 3).score(pairs)
    monkeypatch.setattr(scoring, "_HEAD_POSITIONS", 3)
    for (a, hit), (b, other) in zip(whole, scorer(run, 3).score(pairs), strict=True):
        assert a == pytest.approx(b, abs=1e-5) and hit == other


def test_a_text_ends_before_the_first_stop(run: TrainedModel) -> None:
    prompt = [Prompt([0, 30])]
    [free] = scorer(run, 1).continue_prompts(prompt, Sampling(max_new_tokens=12))
    assert (free.num_tokens, free.is_ended) == (12, False) and len(free.text) > 4
    stop = free.text[2:4]
    sampling = Sampling(max_new_tokens=12, until=("\0", stop))
    [cut] = scorer(run, 1).continue_prompts(prompt, sampling)
    assert cut.text == free.text[: free.text.find(stop)]
    assert cut.is_ended and cut.num_tokens < 12
    [nothing] = scorer(run, 1).continue_prompts(prompt, Sampling(max_new_tokens=0))
    assert nothing == ("", 0, False, ())


def test_prompts_that_differ_by_more_than_is_written_are_apart() -> None:
    inputs = [[1] * n for n in (90, 20, 85, 3, 19)]
    assert scoring._alike(inputs, 2, 16) == [[0, 2], [1, 4], [3]]
    assert scoring._alike(inputs, 8, 70) == [[0, 2, 1], [4, 3]]


def test_the_mode_is_left_as_it_was(run: TrainedModel) -> None:
    run.model.train()
    try:
        scorer(run, 1).score([([0], [20])])
        assert run.model.training
    finally:
        run.model.eval()


def test_a_text_longer_than_a_sequence_is_refused(run: TrainedModel) -> None:
    with pytest.raises(DataError, match="scores a text of 65 tokens at once"):
        scorer(run, 1).score([([0], [20] * 65)])

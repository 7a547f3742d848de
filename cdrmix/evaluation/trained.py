"""A trained run as one plain model: for text, evaluation and export in a single process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.config.schema import Config
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.sample import ensure_sample
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from cdrmix.errors import StateError
from cdrmix.evaluation.perplexity import Evaluation, evaluate
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.models.generate import generate
from cdrmix.reasoning.parts import is_stage_b

logger = get_logger(__name__)


@dataclass(frozen=True)
class Trained:
    """Model, configuration and tokenizer of one checkpoint.

    Attributes:
        config: resolved configuration that it was trained with.
        model: the whole backbone, float32, evaluation mode.
        tokenizer: of the corpus that it was trained on.
        data: folder of that corpus.
        step: optimizer steps it was trained for.
    """

    config: Config
    model: Backbone
    tokenizer: Tokenizer
    data: Path
    step: int

    @property
    def tokenizer_digest(self) -> str:
        """sha256 of the tokenizer's file, hex."""
        return hashlib.sha256((self.data / TOKENIZER_FILE).read_bytes()).hexdigest()


def load_trained(source: Path) -> Trained:
    """Load the newest checkpoint under `source` that verifies, whatever layout saved it.

    Args:
        source: a run directory or a checkpoint.
    Raises:
        StateError: if there is none.
        DataError: if the corpus's tokenizer is not where it was.
    """
    found = store.find(source)
    if found is None:
        raise StateError(
            f"{source}: holds no checkpoint. Give a run directory that has trained to its first "
            "save, or one of its checkpoints/<step> folders"
        )
    for name, why in found.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    with CheckpointReader(found.path) as reader:
        config = Config.model_validate(reader.state["config"])
        with torch.device(runtime.device()):
            model = Backbone(config.model)
        stage_b = frozenset(filter(is_stage_b, reader.names()))
        engine_state.load_module(model, reader, logical_name, others=stage_b)
    if config.data.path == "sample":
        data = ensure_sample(config.model.vocab_size)
    else:
        data = local_folder(config.data, config.training.sequence_length)
    return Trained(config, model.eval(), load_tokenizer(data), data, found.step)


def continue_text(
    source: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """The text that a trained model goes on with after `prompt`."""
    trained = load_trained(source)
    tokenizer = trained.tokenizer
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]  # documents follow an EOS in training
    new = generate(
        trained.model,
        torch.tensor([ids], device=runtime.device()),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_id=tokenizer.eos_id,
    )
    return tokenizer.decode([token for token in new[0].tolist() if token != tokenizer.eos_id])


def evaluate_run(source: Path, *, max_tokens: int | None = None) -> Evaluation:
    """Held-out loss of a trained model on its own corpus.

    Args:
        source: a run directory or a checkpoint.
        max_tokens: most tokens read; None: as many as at the end of its training.
    """
    trained = load_trained(source)
    if max_tokens is None:
        max_tokens = trained.config.evaluation.final_tokens
    logger.info("%s: step %d on %s", source, trained.step, trained.data)
    dataset = TokenDataset(trained.data, "validation", trained.config.training.sequence_length)
    return evaluate(
        trained.model,
        dataset,
        max_tokens=max_tokens,
        batch_size=8,
        segment_documents=trained.config.data.segment_documents,
    )

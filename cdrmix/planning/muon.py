"""Share of a model that Muon trains, and the FLOPs of its Newton-Schulz iteration; no torch.

Muon is for the matrices between the residual stream and a hidden layer. Embedding and head turn
tokens into vectors, a router decides, a convolution's kernel mixes a few tokens: there its updates
train a poorer model without an error, so these are AdamW's, as are vectors and adapters.
"""

from __future__ import annotations

import math
from collections import Counter

from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.schema import Config
from cdrmix.planning.counts import attended_tokens, count, parameters
from cdrmix.planning.layout import Degrees, Group
from cdrmix.planning.parameter import Parameter, Part

# Above this ratio of Newton-Schulz FLOPs to training FLOPs a plan warns.
DEAR_RATIO = 0.10
# Parts of a model whose matrices Muon trains; of experts and low-rank pairs a key decides.
_PARTS: frozenset[Part] = frozenset({"time_mix", "attention", "feed_forward", "mamba"})
# Weights that hold two maps in their rows: gate and up of transformers' packed experts.
_TWO_MAPS = "gate_up_proj"
# Weights that hold several maps of unequal rows, which are AdamW's: time step, input and output of
# Mamba's scan. As one matrix their updates would not be independent.
_SEVERAL_MAPS = "x_proj.weight"
# Elements of a rank's own matrices that are exchanged and orthogonalised at a time.
ROUND_ELEMENTS = 2**26
# Bytes that a round takes for each of these elements, of square matrices, which take most: float32
# of what is followed, of the matrices and of their stack; the iteration's input, output and two
# products beside them, in float32 on CPUs and bfloat16 on GPUs.
WORKING_BYTES = {"cpu": 3 * 4 + 4 * 4, "cuda": 3 * 4 + 4 * 2}


def takes_muon(parameter: Parameter, optimizer: OptimizerConfig) -> bool:
    """True if the matrices of a trained parameter are Muon's, with `optimizer.kind: muon`.

    A parameter of three dimensions is a stack of experts, or a convolution's kernel.
    """
    if optimizer.kind != "muon" or not parameter.is_trained:
        return False
    if parameter.name.endswith(_SEVERAL_MAPS):
        return False
    if parameter.part in ("experts", "mamba_experts"):
        return optimizer.experts == "muon" and len(parameter.shape) in (2, 3)
    if parameter.part == "low_rank":
        return optimizer.low_rank == "muon" and len(parameter.shape) == 2
    return parameter.part in _PARTS and len(parameter.shape) == 2


def maps_in_rows(name: str) -> int:
    """Number of maps, of equally many rows, that a weight of this name holds one above another."""
    return 2 if name.endswith(_TWO_MAPS) else 1


def matrices_of(parameter: Parameter) -> tuple[int, int, int]:
    """Matrices in a parameter that Muon takes: their number, rows and columns of each."""
    *stack, rows, columns = parameter.shape
    maps = maps_in_rows(parameter.name)
    return math.prod(stack) * maps, rows // maps, columns


def neuron_bytes(config: Config, degrees: Degrees, *, has_experts: bool) -> int:
    """Bytes of NorMuon's mean squares on a rank, with experts or without: a row's is where its
    matrix is owned. A rank's share, rounded up, of all rows: the ranks' differ by matrices."""
    optimizer = config.optimizer
    if optimizer.kind != "muon" or not optimizer.neuron_norm:
        return 0
    rows: Counter[bool] = Counter()  # of experts, and of the rest
    for parameter in parameters(config.model):
        if takes_muon(parameter, optimizer):
            number, of_each, _ = matrices_of(parameter)
            rows[parameter.part == "experts"] += number * of_each
    stages = degrees.pipeline
    group: Group = "experts" if has_experts else "matrices"
    of_experts = -(-rows[True] // (degrees.split_ranks(group) * stages))
    return 4 * (
        -(-of_experts // degrees.optimizer_ranks(group))
        + -(-rows[False] // (degrees.data * stages))
    )


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of one matrix: two products with a long side a step, and one of short sides."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def newton_schulz_flops_per_step(config: Config) -> int:
    """FLOPs of the Newton-Schulz iterations of an optimizer step, all ranks; 0 without Muon.

    They do not depend on the batch: each matrix is orthogonalised once a step.
    """
    optimizer = config.optimizer
    total = 0
    for parameter in parameters(config.model) if optimizer.kind == "muon" else ():
        if takes_muon(parameter, optimizer):
            number, rows, columns = matrices_of(parameter)
            total += number * newton_schulz_flops(rows, columns, optimizer.newton_schulz_steps)
    return total


def newton_schulz_ratio(config: Config) -> float:
    """Those FLOPs as a share of a step's training FLOPs."""
    training = config.training
    per_token = count(config.model, attended_tokens(config)).train_flops_per_token
    return newton_schulz_flops_per_step(config) / (per_token * training.tokens_per_step)


def muon_matrices(config: Config) -> tuple[int, int]:
    """Number of matrices that Muon trains in the whole model, and of their elements."""
    taken = [each for each in parameters(config.model) if takes_muon(each, config.optimizer)]
    return sum(matrices_of(each)[0] for each in taken), sum(each.num_elements for each in taken)


def ratio_warning(config: Config) -> str:
    """Tells of dear Newton-Schulz iterations, with the batch at which they are not; "" if cheap."""
    if config.optimizer.kind != "muon":
        return ""
    ratio = newton_schulz_ratio(config)
    if ratio <= DEAR_RATIO:
        return ""
    tokens = config.training.tokens_per_step
    advice = [f"batches of {math.ceil(ratio / DEAR_RATIO * tokens):,} tokens and more"]
    without = config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"experts": "adamw"})}
    )
    if (rest := newton_schulz_ratio(without)) < ratio:
        advice.append(f"optimizer.experts = adamw, which leaves {rest:.2g}")
    return (
        f"optimizer.kind = muon: Newton-Schulz takes {ratio:.2g} of the FLOPs of training at "
        f"{tokens:,} tokens a step, and above {DEAR_RATIO:g} AdamW is likely to be faster. Try "
        f"{' or '.join([*advice, 'optimizer.kind = adamw'])}"
    )

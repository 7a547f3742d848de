"""Rules of `training.compile`: what blocks cannot be compiled with."""

from __future__ import annotations

from cdrmix.config.plugin import is_plugin
from cdrmix.planning.layout import Combination
from cdrmix.planning.rule import THIS_VERSION, Rule


def _compiles(x: Combination) -> bool:
    return x.training.compile != "off"


def _plugin_mixers(x: Combination) -> list[str]:
    if not _compiles(x) or x.model.kind == "hf":
        return []
    return sorted({name for name in x.model.layer_kinds() if is_plugin(name)})


def _why_no_cuda_graphs(x: Combination) -> str:
    """Returns the message that refuses CUDA graphs, with what moves in this layout."""
    if x.device == "cpu":
        why = "CPUs have none"
    elif x.degrees.expert > 1:
        why = (
            f"with parallel.expert = {x.degrees.expert} the number of rows that a rank receives "
            "changes with each batch, and a recorded graph has fixed sizes"
        )
    else:
        why = (
            "one graph serves all layers of a kind, with their weights as inputs, and a recorded "
            "graph holds the addresses of one layer's"
        )
    return (
        f"training.compile = reduce-overhead records CUDA graphs: {why}. Try training.compile = "
        "blocks"
    )


COMPILE_RULES: tuple[Rule, ...] = (
    Rule(
        "cuda-graphs-of-blocks",
        lambda x: x.training.compile == "reduce-overhead",
        _why_no_cuda_graphs,
        "torch 2.13 torch/_inductor/cudagraph_trees.py: static inputs",
    ),
    Rule(
        "compile-with-stage-3",
        lambda x: _compiles(x) and x.zero_stage == 3,
        "training.compile = {x.training.compile} cannot run with zero_optimization.stage = 3: its "
        "weights are empty but while a module runs, and DeepSpeed's hooks gather them, which no "
        "graph can hold. Try profile 'zero2', or training.compile = off",
        "DeepSpeed 0.19.8 runtime/zero/parameter_offload.py: hooks on each module",
    ),
    Rule(
        "compile-with-tensor-unavailable",
        lambda x: _compiles(x) and x.degrees.tensor > 1,
        "training.compile = {x.training.compile} with parallel.tensor = {x.degrees.tensor} is "
        "{unavailable}: hooks sum over ranks in place inside a block, which a graph takes for a "
        "change of its inputs. Try parallel.tensor = 1, or training.compile = off",
        THIS_VERSION,
    ),
    Rule(
        "compile-with-sequence-unavailable",
        lambda x: _compiles(x) and x.degrees.sequence > 1,
        "training.compile = {x.training.compile} with parallel.sequence = {x.degrees.sequence} is "
        "{unavailable}: token shift, recurrence and attention exchange tokens inside a block. Try "
        "parallel.sequence = 1, or training.compile = off",
        THIS_VERSION,
    ),
    Rule(
        "compile-recomputed",
        lambda x: _compiles(x) and x.training.activation_checkpointing in ("selective", "spans"),
        "training.compile = {x.training.compile} with training.activation_checkpointing = "
        "{x.training.activation_checkpointing}: the compiler decides by itself which cheap values "
        "to compute again, and its graphs are of whole sequences without a state. Try block, or "
        "none",
        "torch 2.13 torch/_functorch/partitioners.py: min_cut_rematerialization_partition",
    ),
    Rule(
        "compile-a-hugging-face-model-unavailable",
        lambda x: _compiles(x) and x.model.kind == "hf",
        "training.compile = {x.training.compile} with model.kind = hf is {unavailable}: what "
        "breaks the graphs of its family's layers is not known. Try training.compile = off",
        THIS_VERSION,
    ),
    Rule(
        "compile-routed-blocks-unavailable",
        lambda x: _compiles(x) and x.model.mod is not None,
        "training.compile = {x.training.compile} with model.mod is {unavailable}: a routed block "
        "takes as many tokens as its threshold lets through, and a graph has fixed shapes. Try "
        "model.mod = null, or training.compile = off",
        THIS_VERSION,
    ),
    Rule(
        "compile-plugins-unavailable",
        _plugin_mixers,
        "training.compile = {x.training.compile} with the block type {found[0]} is {unavailable}: "
        "code of yours may read values, which breaks a graph. Try training.compile = off",
        THIS_VERSION,
    ),
    Rule(
        "compile-stage-b-unavailable",
        lambda x: (
            _compiles(x) and x.config.stage_b is not None and x.training.stage in ("b", "all")
        ),
        "training.compile = {x.training.compile} with training.stage = {x.training.stage} is "
        "{unavailable}: lessons of Stage B are of many lengths, and each would be compiled anew. "
        "Try training.stage = a, or training.compile = off",
        THIS_VERSION,
    ),
    Rule(
        "compile-while-probing",
        lambda x: _compiles(x) and x.training.micro_batch_size == "auto",
        "training.compile = {x.training.compile} with training.micro_batch_size = auto: each size "
        "that is tried would be compiled anew, for minutes. Try a number, such as the one that a "
        "run without compile finds",
        "shapes are fixed in a graph",
    ),
)

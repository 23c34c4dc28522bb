"""How the models of this package are cut by tensor and sequence parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspore import nn

from ms_zero import kernels
from ms_zero.comm import ProcessMesh
from ms_zero.config import GPTConfig, LlamaConfig
from ms_zero.parallel import (
    Column,
    Enter,
    Inside,
    OwnTokens,
    Placements,
    Plan,
    Row,
    SplitSequence,
    Vocabulary,
    VocabularyCrossEntropySum,
    WholeSequence,
    parallelize,
)


def tensor_plan(config: GPTConfig | LlamaConfig) -> Plan:
    """The plan of a model family."""
    return _gpt_plan(config) if config.family == "gpt" else _llama_plan(config)


def _gpt_plan(config: GPTConfig) -> Plan:
    block = "transformer.h.*"
    return {
        "transformer.wte": Vocabulary(),
        "transformer.wpe": OwnTokens(),
        f"{block}.attn": Enter(),
        f"{block}.attn.[qkv]_proj": Column(blocks=config.num_heads),
        f"{block}.attn.c_proj": Row(),
        f"{block}.mlp": Enter(),
        f"{block}.mlp.c_fc": Column(),
        f"{block}.mlp.c_proj": Row(),
        "lm_head": Column(enters=True),
    }


def _llama_plan(config: LlamaConfig) -> Plan:
    layer = "model.layers.*"
    norms = {f"{layer}.self_attn.[qk]_norm": Inside()} if config.qk_norm else {}
    return {
        "model.embed_tokens": Vocabulary(),
        f"{layer}.self_attn": Enter(),
        f"{layer}.self_attn.q_proj": Column(blocks=config.num_heads),
        f"{layer}.self_attn.[kv]_proj": Column(blocks=config.num_kv_heads),
        f"{layer}.self_attn.o_proj": Row(),
        f"{layer}.mlp": Enter(),
        f"{layer}.mlp.gate_proj": Column(),
        f"{layer}.mlp.up_proj": Column(),
        f"{layer}.mlp.down_proj": Row(),
        "lm_head": Column(enters=True),
        **norms,
    }


@dataclass(frozen=True)
class CutModel:
    """What is different about a model that was cut.

    Attributes:
        placements: of its parameters.
        loss_sum: maps its logits [N, V / tp] and labels int32 [N] to the summed token loss.
        spans_of: length of a sequence -> the token ranges that this rank has outside of regions; None: all.
    """

    placements: Placements
    loss_sum: nn.Cell
    spans_of: Callable[[int], Sequence[tuple[int, int]]] | None


def cut_model(
    model: nn.Cell, config: GPTConfig | LlamaConfig, pmesh: ProcessMesh, *, split_sequence: bool
) -> CutModel:
    """Cut a plain model over the mesh's ``tp`` axis; with one rank there it stays plain.

    Raises:
        UserError: the model cannot be cut between so many ranks.
    """
    group = pmesh.group("tp")
    if group.size == 1:
        return CutModel(Placements(), kernels.CrossEntropySum(), None)
    border = SplitSequence(pmesh.comm, group) if split_sequence else WholeSequence(pmesh.comm, group)
    return CutModel(
        parallelize(model, tensor_plan(config), border),
        VocabularyCrossEntropySum(pmesh.comm, group, config.vocab_size),
        (lambda length: [border.span(length)]) if split_sequence else None,
    )

"""How the models of this package are cut by tensor and sequence parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspore import nn

from ms_zero import kernels
from ms_zero.comm import ProcessMesh
from ms_zero.config import GPTConfig, LlamaConfig, MoEConfig
from ms_zero.parallel import (
    Column,
    Cut,
    Enter,
    Inside,
    OwnTokens,
    Placements,
    Plan,
    Region,
    Row,
    SplitSequence,
    Vocabulary,
    VocabularyCrossEntropySum,
    WholeSequence,
    parallelize,
)


def tensor_plan(config: GPTConfig | LlamaConfig | MoEConfig) -> Plan:
    """The plan of a model family."""
    return {"gpt": _gpt_plan, "llama": _llama_plan, "moe": _moe_plan}[config.family](config)


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
    return {
        "model.embed_tokens": Vocabulary(),
        f"{layer}.self_attn": Enter(),
        **_heads_plan(config, layer),
        f"{layer}.mlp": Enter(),
        **_gated_plan(f"{layer}.mlp", Row()),
        "lm_head": Column(enters=True),
    }


def _moe_plan(config: MoEConfig) -> Plan:
    layer = "model.layers.*"
    dense = [f"model.layers.{number}.mlp" for number in range(config.dense_layers)]
    plan = {
        "model.embed_tokens": Vocabulary(),
        f"{layer}.self_attn": Enter(),
        **(_heads_plan(config, layer) if config.latent is None else _latent_plan(config, layer)),
        **dict.fromkeys(dense, Enter()),
        **(_gated_plan(f"{layer}.mlp", Row()) if dense else {}),
        "lm_head": Column(enters=True),
    }
    if config.dense_layers == config.num_layers:
        return plan
    routed = [f"model.layers.{number}.mlp" for number in range(config.dense_layers, config.num_layers)]
    return {
        **plan,
        **dict.fromkeys(routed, Region()),
        f"{layer}.mlp.router": Inside(),
        f"{layer}.mlp.experts": Cut((("gate_proj", 1), ("up_proj", 1), ("down_proj", 2))),
        **(_gated_plan(f"{layer}.mlp.shared", Row(leaves=False)) if config.shared_ffn_hidden_size else {}),
        **({f"{layer}.mlp.shared_gate": Inside()} if config.shared_gate else {}),
    }


def _heads_plan(config: LlamaConfig | MoEConfig, layer: str) -> Plan:
    norms = {f"{layer}.self_attn.[qk]_norm": Inside()} if config.qk_norm else {}
    return {
        f"{layer}.self_attn.q_proj": Column(blocks=config.num_heads),
        f"{layer}.self_attn.[kv]_proj": Column(blocks=config.num_kv_heads),
        f"{layer}.self_attn.o_proj": Row(),
        **norms,
    }


def _latent_plan(config: MoEConfig, layer: str) -> Plan:
    """Heads are cut; what is compressed for all of them is whole on every rank."""
    attention, heads = f"{layer}.self_attn", Column(blocks=config.num_heads)
    if config.latent.q_rank:
        queries = {
            f"{attention}.q_a_proj": Inside(),
            f"{attention}.q_a_layernorm": Inside(),
            f"{attention}.q_b_proj": heads,
        }
    else:
        queries = {f"{attention}.q_proj": heads}
    return {
        **queries,
        f"{attention}.kv_a_proj_with_mqa": Inside(),
        f"{attention}.kv_a_layernorm": Inside(),
        f"{attention}.kv_b_proj": heads,
        f"{attention}.o_proj": Row(),
    }


def _gated_plan(mlp: str, down: Row) -> Plan:
    return {f"{mlp}.gate_proj": Column(), f"{mlp}.up_proj": Column(), f"{mlp}.down_proj": down}


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
    model: nn.Cell, config: GPTConfig | LlamaConfig | MoEConfig, pmesh: ProcessMesh, *, split_sequence: bool
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

"""Context parallelism of the graph engine: what the compiler makes of it, and the order of tokens."""

import re
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from front_end_cases import PARAMETERS, TOKENS, compiled, config_of, mesh_of, text_of
from mindspore import Tensor, nn, ops

from ms_zero import kernels, models
from ms_zero.comm import Group, local
from ms_zero.config import GPTConfig, LlamaConfig, load_config, require_runnable
from ms_zero.graph import ring
from ms_zero.graph.build import needs_auto_parallel
from ms_zero.graph.compiled import CompiledEngine
from ms_zero.graph.report import axis_bytes
from ms_zero.graph.strategies import (
    DocumentMask,
    Grid,
    ProductAttention,
    RowNorm,
    ShardedCrossEntropySum,
    sharded_model,
)
from ms_zero.plan import compiled as plan
from ms_zero.plan.run import layout_of
from ms_zero.plan.shapes import from_config

RING = ("parallel.cp=4",)
BLOCK = 2 * TOKENS // 4 * 2 * 16  # keys and values of a rank: 2 heads of 16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "ffn_hidden_size": 64,
    "max_seq_len": 16,
    "norm_eps": 1e-5,
    "init_std": 0.1,
    "dropout": 0.0,
}
GPT = GPTConfig(**SIZES, tie_embeddings=True)
LLAMA = LlamaConfig(
    **SIZES, num_kv_heads=2, head_dim=8, tie_embeddings=False, rope_theta=1e4, rope_scaling=None
)


def messages(graph, phase):
    return [
        (each.sent.dtype, each.sent.shape, each.ranks) for each in graph.select("AlltoAllV", phase=phase)
    ]


def test_a_ring_passes_blocks_on_and_nothing_gathers_keys_and_values():
    found = compiled(4, *RING, rank=1)
    there, fp32 = ("BFloat16", (BLOCK,), (0, 1, 2, 3)), ("Float32", (BLOCK,), (0, 1, 2, 3))
    assert messages(found.graph, "forward") == [there] * 3
    # Keys and values once more, and the gradient of each block behind them; in this order on every rank.
    assert messages(found.graph, "backward") == [there, there, fp32, there, fp32, fp32]
    wide = [each.name for each in found.graph.select(role="layout") if each.sent.shape]
    assert set(wide) == {"AlltoAllV"}
    assert found.graph.number("AllReduce", role="gradient", ranks=range(4)) == PARAMETERS
    assert found.deprecations() == []


def test_a_ring_sends_what_the_planner_says():
    config, graph = config_of(4, *RING, "engine=graph"), compiled(4, *RING, rank=1).graph
    planned = plan.stage_bytes(from_config(config.model), layout_of(config), 0)["cp"]
    assert axis_bytes(graph, mesh_of(4, *RING), 1)["cp"] == planned == 3 * BLOCK * (2 + 2 + 4)


def test_every_turn_of_a_ring_computes_half_of_a_block_and_only_the_first_has_a_mask():
    number = r"I64\((-?\d+)\)"
    pattern = rf"= PrimFunc_FlashAttentionScore\(.*{number}\)[^\n]*\n *: \((.*)\) -> "
    found = re.findall(pattern, text_of(4, *RING, rank=1))
    shapes = [re.findall(r"\(1, (\d+), \d, 16\)", types) for _, types in found]
    # Rank 1 meets the blocks of ranks 0, 3 and 2: an earlier one, then later ones.
    assert [mode for mode, _ in found] == ["2", "0", "0", "0"]
    assert shapes == [["8", "8", "8"], ["8", "4", "4"], ["4", "8", "8"], ["4", "8", "8"]]


def test_a_ring_beside_tensor_and_sequence_parallelism_and_hsdp():
    overrides = ("parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    overrides += ("parallel.zero_stage=2", "train.accumulation_steps=2")
    graph = compiled(8, *overrides, rank=5).graph
    # Ranks 5 and 7 have the same heads; each microbatch goes round.
    assert graph.number("AlltoAllV", phase="forward", ranks=(5, 7)) == 2
    assert graph.number("AlltoAllV", phase="backward", ranks=(5, 7)) == 4
    assert graph.number("AlltoAllV") == 6
    assert graph.number("ReduceScatter", role="gradient", ranks=(1, 3, 5, 7)) == 2 * (PARAMETERS - 3)


def test_selective_recompute_goes_round_again():
    graph = compiled(2, "parallel.cp=2", "memory.recompute=selective").graph
    assert graph.counts["FlashAttentionScore"] == 2 * graph.counts["FlashAttentionScoreGrad"] == 4
    assert len(messages(graph, "forward")) == 2


PACKED = ("data.reset_attention=true", "data.reset_positions=true")


def test_a_ring_hides_other_documents_in_every_turn():
    overrides = ("parallel.cp=2", *PACKED)
    found = compiled(2, *overrides, rank=1)
    pattern = r"= PrimFunc_FlashAttentionScore(?:Grad)?\([^\n]*\n *: \(([^\n]*)\) -> "
    text = text_of(2, *overrides, rank=1)
    masks = [re.findall(r"Tensor\[UInt8\], \(([\d, ]*)\)", types) for types in re.findall(pattern, text)]
    # Own blocks whole, the first half of the earlier one; the gradients in the same order.
    assert masks == [["1, 1, 16, 16"], ["1, 1, 16, 8"]] * 2
    assert messages(found.graph, "forward") == [("BFloat16", (2 * BLOCK,), (0, 1))]
    assert found.deprecations() == []


@pytest.mark.parametrize(("family", "context"), [("llama", "parallel.tp=2"), ("gpt", "parallel.cp=2")])
def test_documents_become_a_mask_and_nothing_more_is_sent(family, context):
    overrides = (context, "parallel.context=ulysses") if "cp" in context else (context,)
    packed, plain = (compiled(4, *overrides, *extra, family=family) for extra in (PACKED, ()))
    assert packed.graph.summary() == plain.graph.summary()
    assert packed.graph.counts["LogicalOr"] == 1
    assert packed.graph.counts["FlashAttentionScore"] == packed.graph.counts["FlashAttentionScoreGrad"] == 1


class Unused:
    """Stands for AlltoAllV, which only a job can create."""

    def __init__(self, group):
        pass

    def add_prim_attr(self, *args):
        pass


class InOwnOrder(nn.Cell):
    """Attention of one process on samples in the order of a ring."""

    def __init__(self, attention, order):
        super().__init__()
        self.attention, self.document_mask = attention, DocumentMask(Grid())
        self.there, self.back = Tensor(order), Tensor(np.argsort(order).astype(np.int32))

    def construct(self, q, k, v, starts=None):
        q, k, v = (ops.gather(x, self.back, 1) for x in (q, k, v))
        hidden = None if starts is None else self.document_mask(ops.gather(starts, self.back, 1))
        return ops.gather(self.attention(q, k, v, hidden), self.there, 1)


class ComposedRMSNorm(nn.Cell):
    """Stands for the operator that CPU lacks."""

    def __init__(self, eps):
        super().__init__()
        self.norm = kernels.RMSNorm(eps, "CPU-portable")

    def construct(self, x, weight):
        return (self.norm(x, weight),)


def twin_in_order(plain, config, order, is_ring):
    grid = Grid(cp=2, ring=Group("cp", (0, 1), 0, "cp")) if is_ring else Grid()
    twin = sharded_model(plain, config, grid, ms.float32)
    kv_heads = getattr(config, "num_kv_heads", config.num_heads)
    for _, cell in twin.cells_and_names():
        if isinstance(cell, RowNorm) and cell.bias is None:
            cell.norm = ComposedRMSNorm(config.norm_eps)
        if isinstance(getattr(cell, "attention", None), ring.RingAttention):
            cell.attention = InOwnOrder(ProductAttention(config.num_heads, kv_heads, 8, Grid()), order)
    return twin


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(("is_ring", "is_packed"), [(True, False), (True, True), (False, True)])
def test_twins_have_the_loss_and_the_gradients_of_the_plain_model(config, is_ring, is_packed, monkeypatch):
    monkeypatch.setattr(ring.ops, "AlltoAllV", Unused)
    values = {key: value for key, value in vars(config).items() if key != "family"}
    plain = (models.GPT if config.family == "gpt" else models.Llama)(**values, target="CPU-portable")
    models.initialise(plain, 7)
    order = ring.ring_order(16, 2 if is_ring else 1)
    twin = twin_in_order(plain, config, order, is_ring)
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, 64, (3, 16)).astype(np.int32) for _ in range(2))
    labels[:, ::5] = -100
    starts = np.where(np.arange(16) < [[3], [9], [16]], 0, [[3], [9], [16]]).astype(np.int32)
    extras = [np.arange(16, dtype=np.int32) - starts, starts] if is_packed else []
    params = ms.ParameterTuple(plain.trainable_params())
    plain_loss, twin_loss = kernels.CrossEntropySum(target="CPU-portable"), ShardedCrossEntropySum(64, Grid())
    expected, wanted = ops.value_and_grad(
        lambda: plain_loss(
            plain(Tensor(ids), *map(Tensor, extras)).reshape((-1, 64)), Tensor(labels.reshape(-1))
        ),
        None,
        params,
    )()
    ours = [Tensor(x[:, order]) for x in (ids, *extras)]
    labels = Tensor(labels[:, order].reshape(-1))
    loss, grads = ops.value_and_grad(lambda: twin_loss(twin(*ours), labels), None, params)()
    np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), rtol=1e-5)
    largest = max(np.abs(want.asnumpy()).max() for want in wanted)
    for param, grad, want in zip(params, grads, wanted, strict=True):
        np.testing.assert_allclose(
            grad.asnumpy(), want.asnumpy(), rtol=1e-3, atol=1e-5 * largest, err_msg=param.name
        )


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_a_run_that_cuts_samples_is_accepted_for_ascend(context):
    overrides = ["engine=graph", "hardware.target=Ascend", "hardware.device=ascend-910b2"]
    overrides += ["precision.policy=bf16", "train.global_batch_size=auto", "train.micro_batch_size=1"]
    overrides += ["train.eval_interval=0", "parallel.cp=2", f"parallel.context={context}", *PACKED]
    config = load_config("runs/quickstart", overrides, 4).config
    require_runnable(config)
    assert needs_auto_parallel(config)


def test_the_engine_hands_over_samples_in_the_order_of_its_graph():
    class Step:
        def forward_backward(self, *batch, weight):
            self.batch = [tensor.asnumpy().tolist() for tensor in batch]

    step, comm = Step(), local()
    order = partial(ring.ring_order, degree=2)
    engine = CompiledEngine(nn.Cell(), step, comm=comm, group=comm.world, order=order)
    ids = np.arange(8, dtype=np.int32)[None]
    engine.forward_backward(ids, ids + 1, weight=1.0, last=True)
    assert step.batch == [[[0, 1, 6, 7, 2, 3, 4, 5]], [[1, 2, 7, 8, 3, 4, 5, 6]]]

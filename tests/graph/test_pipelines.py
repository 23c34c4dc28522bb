"""Pipelines as the front end compiles them: every order, tied tables, halves of microbatches, parts of
sequences. What CPU can execute of them is executed.
"""

import re

import mindspore as ms
import numpy as np
import pytest
from front_end_cases import HIDDEN, TOKENS, compiled, config_of, text_of
from mindspore import Tensor, nn, ops
from mindspore.parallel.nn import MicroBatchInterleaved

from ms_zero import kernels, models
from ms_zero.config import LlamaConfig
from ms_zero.errors import UserError
from ms_zero.graph.network import LossNetwork, ScaledLoss, loss_factor
from ms_zero.graph.parallel import options_of
from ms_zero.graph.seqpipe import CachedAttention, SequenceParts, caches, in_parts
from ms_zero.graph.step import graph_mode
from ms_zero.graph.strategies import Grid, RowNorm, ShardedCrossEntropySum, sharded_model

VOCABULARY = 512


def pipeline(stages, schedule, layers, microbatches=4):
    keys = (f"parallel.pp={stages}", f"parallel.schedule={schedule}", f"model.num_layers={layers}")
    virtual = ("parallel.virtual_stages=2",) if schedule == "interleaved" else ()
    return (*keys, *virtual, f"train.accumulation_steps={microbatches}")


def messages(graph, name, phase):
    return graph.number(name, role="pipeline", phase=phase)


@pytest.mark.parametrize(
    ("schedule", "layers", "microbatches", "sent", "received"),
    [
        # Each microbatch comes from rank 0 and goes on to rank 2; in two parts with seqpipe.
        ("gpipe", 4, 4, 4, 4),
        ("seqpipe", 4, 4, 8, 8),
    ],
)
def test_a_rank_in_the_middle_of_four_stages(schedule, layers, microbatches, sent, received):
    graph = compiled(4, *pipeline(4, schedule, layers, microbatches), rank=1).graph
    for phase in ("forward", "backward"):
        assert (messages(graph, "Send", phase), messages(graph, "Receive", phase)) == (sent, received)
    peers = {each.peer for each in graph.select(role="pipeline")}
    assert peers == {0, 2}


def test_zero_bubble_v_begins_and_ends_on_the_first_stage():
    graph = compiled(2, *pipeline(2, "zb-v", 4)).graph
    for name in ("Send", "Receive"):
        for phase in ("forward", "backward"):
            assert messages(graph, name, phase) == 4, (name, phase)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= graph.parameters.keys()
    # The loss is there as well, the sum of that of four microbatches.
    text = text_of(2, *pipeline(2, "zb-v", 4))
    (loss,) = re.findall(r"PrimFunc_Assign\(%\w+_step_loss, %(\d+),", text)
    (total,) = re.findall(rf"^  %{loss}\(\S+ = Depend\(%(\d+),", text, re.MULTILINE)
    assert re.search(rf"^  %{total}\(\S+ = PrimFunc_Add\(", text, re.MULTILINE)
    assert options_of(config_of(2, *pipeline(2, "zb-v", 4))).loss_rank == 0
    assert options_of(config_of(8, "parallel.tp=2", *pipeline(2, "1f1b", 4))).loss_rank == 4


def test_stages_have_the_blocks_that_the_keys_say():
    keys = ("parallel.pp=2", "train.accumulation_steps=2", "model.num_layers=4")
    assert options_of(config_of(2, *keys, "parallel.stage_layers=[3, 1]")).stages.chunk_layers == (3, 1)
    stages = options_of(config_of(2, *keys, "parallel.schedule=zb-v", "train.accumulation_steps=4")).stages
    assert [stages.place(chunk) for chunk in range(4)] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    # A large table of tokens and a large head weigh more than the blocks.
    large = (*pipeline(4, "1f1b", 4), "model.vocab_size=50000")
    assert options_of(config_of(4, *large)).stages.chunk_layers == (0, 2, 2, 0)
    with pytest.raises(UserError, match=r"the stages have \[0, 2, 2, 0\] blocks"):
        options_of(config_of(4, *large, "parallel.schedule=seqpipe"))


TIED = (*pipeline(2, "1f1b", 2, microbatches=2), "model.tie_embeddings=true")


@pytest.mark.parametrize(
    ("level", "policy", "dtype", "ranks"), [(0, "fp32", "Float32", (0,)), (3, "bf16", "BFloat16", (0, 3))]
)
def test_a_tied_table_goes_to_the_last_stage_and_its_gradient_comes_back(level, policy, dtype, ranks):
    keys = (*TIED, f"parallel.zero_stage={level}", f"precision.policy={policy}")
    graphs = [compiled(4, *keys, rank=rank).graph for rank in ranks]
    ways = [(("Send", "forward", "sent"), ("Receive", "backward", "received"))]
    ways += [(("Receive", "forward", "received"), ("Send", "backward", "sent"))]
    for graph, both in zip(graphs, ways):
        for name, phase, tensor in both:
            found = [getattr(each, tensor) for each in graph.select(name, role="pipeline", phase=phase)]
            # With each microbatch, and the same dtype on both sides.
            kinds = [(each.shape, each.dtype) for each in found]
            assert kinds.count(((VOCABULARY, HIDDEN), dtype)) == 2 and len(kinds) == 4, (name, phase)
    # It is a parameter, with a gradient in the norm, on the first stage alone.
    assert "model.embed_tokens.weight" in graphs[0].parameters
    for graph in graphs[1:]:
        assert not any("embed_tokens" in name or "lm_head" in name for name in graph.parameters)


HALVES = ("parallel.tp=2", "train.micro_batch_size=2")


def test_halves_of_a_microbatch_communicate_twice_with_half_the_bytes():
    whole = compiled(4, *HALVES).graph
    halves = compiled(4, *HALVES, "parallel.micro_batch_interleave=2").graph
    for phase in ("forward", "backward"):
        found = [
            [(each.sent.shape, each.times) for each in graph.select("AllReduce", role="layout", phase=phase)
             if each.sent.shape[-1:] == (HIDDEN,)]
            for graph in (whole, halves)
        ]  # fmt: skip
        assert {shape for shape, _ in found[0]} == {(2 * TOKENS, HIDDEN)}
        assert {shape for shape, _ in found[1]} == {(TOKENS, HIDDEN)}
        counts = [sum(times for _, times in each) for each in found]
        assert counts[0] == 3 and counts[1] == 6


def test_parts_of_sequences_attend_to_those_before():
    keys = pipeline(4, "seqpipe", 4)
    graph, text = compiled(4, *keys, rank=1).graph, text_of(4, *keys, rank=1)
    sent = graph.select("Send", role="pipeline", phase="forward")
    assert [each.sent.shape for each in sent] == [(TOKENS // 2, HIDDEN)] * 8
    # Attention of a part: keys before, keys after, mode 4 (a band, counted from the last row and key).
    number = r"Tensor\(shape=\[\], dtype=Int64, value=(-?\d+)\)"
    pattern = rf"= call @.*{number}, {number}, {number}[^)]*\).*seq_chunk: I64\((\d)\).*is_bp: Bool\(0\)"
    found = {tuple(map(int, each)) for each in re.findall(pattern, text)}
    rows = TOKENS // 2
    assert {part for *_, part in found} == {0, 1}
    for before, after, mode, part in found:
        assert mode == 4
        assert [i + TOKENS - rows + after for i in range(rows)] == [part * rows + i for i in range(rows)]
        assert all(i + TOKENS - rows - before <= 0 for i in range(rows))
    # What later parts leave to the keys and values of earlier ones is added, and kept for the next.
    for name in ("key_cache_grad", "value_cache_grad"):
        assert len(re.findall(rf"= PrimFunc_Add\([^)]*\.{name}\)", text)) == 1
        assert len(re.findall(rf"= PrimFunc_Assign\([^)]*\.{name},", text)) == 1


# Executed on CPU.

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=64,
    max_seq_len=16, norm_eps=1e-5, init_std=0.1, dropout=0.0, tie_embeddings=False, rope_theta=1e4,
    rope_scaling=None,
)  # fmt: skip


class Attention(nn.Cell):
    """Of queries of a part on the keys of all parts, fp32; stands for FlashAttention, which CPU lacks."""

    def __init__(self, counter):
        super().__init__(auto_prefix=False)
        self.counter = counter

    def construct(self, q, k, v):
        part, (_, rows, heads, width), length = int(self.counter.number) - 1, q.shape, k.shape[1]
        k, v = (each.repeat_interleave(heads // k.shape[2], 2).transpose(0, 2, 1, 3) for each in (k, v))
        allowed = np.arange(length)[None, :] <= part * rows + np.arange(rows)[:, None]
        scores = ops.BatchMatMul(transpose_b=True)(q.transpose(0, 2, 1, 3), k) / width**0.5
        weights = ops.softmax(scores + Tensor(np.where(allowed, 0, -1e9).astype(np.float32)), -1)
        return ops.BatchMatMul()(weights, v).transpose(0, 2, 1, 3)


class LaterGradients(nn.Cell):
    """What the compiler puts before the cache: adds the gradients that later parts have left."""

    def __init__(self, kept, counter):
        super().__init__(auto_prefix=False)
        self.kept, self.counter, self.parts = kept, counter, []

    def construct(self, x):
        self.parts.append(int(self.counter.number) - 1)
        return x * 1

    def bprop(self, x, out, gradient):
        total = gradient + self.kept
        self.kept.set_data(total * (self.parts.pop() > 0))
        return (total,)


class AddToCache(nn.Cell):
    def __init__(self, kept, counter):
        super().__init__(auto_prefix=False)
        self.later = LaterGradients(kept, counter)

    def construct(self, x, cache):
        return self.later(x) + cache


def losses_and_gradients(network, params, *batch):
    loss, grads = ops.value_and_grad(network, None, params)(*batch)
    return float(loss), {param.name: grad.asnumpy() for param, grad in zip(params, grads, strict=True)}


def batch_of(rows):
    rng = np.random.default_rng(0)
    return tuple(Tensor(rng.integers(0, 64, (rows, 16)).astype(np.int32)) for _ in range(2))


@pytest.fixture
def plain():
    values = {key: value for key, value in vars(LLAMA).items() if key != "family"}
    model = models.Llama(**values, target="CPU-portable")
    models.initialise(model, 7)
    return model


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_of_sequences_have_the_loss_and_the_gradients_of_whole_ones(plain, num_parts):
    params = ms.ParameterTuple(plain.trainable_params())
    whole = ScaledLoss(LossNetwork(plain), loss_factor())
    expected, wanted = losses_and_gradients(whole, params, *batch_of(2))
    twin = sharded_model(plain, LLAMA, Grid(), ms.float32)
    for _, cell in twin.cells_and_names():
        if isinstance(cell, RowNorm):
            cell.norm = ComposedRMSNorm(LLAMA.norm_eps)
    model = in_parts(twin, num_parts=num_parts, samples=2, tokens=16, grid=Grid(), dtype=ms.float32)
    for cache in caches(model):
        cache.init_data()
    for _, cell in model.cells_and_names():
        if isinstance(cell, CachedAttention):
            cell.attention = Attention(model.counter)
            cell.add_keys = AddToCache(cell.key_cache_grad, model.counter)
            cell.add_values = AddToCache(cell.value_cache_grad, model.counter)
    network = ScaledLoss(LossNetwork(model, loss_sum=ShardedCrossEntropySum(64, Grid())), loss_factor())
    parts = SequenceParts(network, model.counter, num_parts)
    assert [param.name for param in parts.trainable_params()] == [param.name for param in params]
    for _ in range(2):  # the second microbatch finds the caches empty again
        loss, grads = losses_and_gradients(parts, params, *batch_of(2))
        assert loss == pytest.approx(expected, rel=1e-5)
        largest = max(np.abs(want).max() for want in wanted.values())
        for name, want in wanted.items():
            np.testing.assert_allclose(grads[name], want, rtol=1e-3, atol=1e-5 * largest, err_msg=name)


def test_halves_of_a_microbatch_have_the_loss_and_the_gradients_of_the_whole(plain):
    params = ms.ParameterTuple(plain.trainable_params())
    whole = ScaledLoss(LossNetwork(plain), loss_factor())
    with graph_mode():
        expected, wanted = losses_and_gradients(whole, params, *batch_of(4))
        loss, grads = losses_and_gradients(MicroBatchInterleaved(whole, 2), params, *batch_of(4))
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, want in wanted.items():
        np.testing.assert_allclose(grads[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


class ComposedRMSNorm(nn.Cell):
    """Stands for the operator that CPU lacks."""

    def __init__(self, eps):
        super().__init__()
        self.norm = kernels.RMSNorm(eps, "CPU-portable")

    def construct(self, x, weight):
        return (self.norm(x, weight),)

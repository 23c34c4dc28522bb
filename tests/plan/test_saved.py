"""The count of saved tensors against the published formulas and against itself."""

import pytest

from ms_zero.plan.recompute import plan_recompute
from ms_zero.plan.saved import (
    IMPLEMENTATIONS,
    BlockShape,
    Split,
    block_bytes,
    block_of,
    block_tensors,
    bytes_by_kind,
    edge_bytes,
)
from ms_zero.plan.shapes import Attention, LayerShape, Mlp, ModelShape

GPT3 = (12288, 96)  # hidden size, heads
MT_NLG = (20480, 128)
SMALL = (64, 4)


def gpt(hidden, heads):
    return BlockShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=4 * hidden,
    )


LLAMA = BlockShape(
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    gated=True,
    rotary=True,
    qk_norm=True,
)


def published(model, recompute, *, tp=1, sequence_parallel=False, seq=2048, batch=2):
    """Bytes of a block over s b h."""
    split = Split(batch=batch, seq_len=seq, tp=tp, sequence_parallel=sequence_parallel, dropout=True)
    found = block_bytes(gpt(*model), split, implementation="published", recompute=recompute)
    return found / (seq * batch * model[0])


@pytest.mark.parametrize("model", [GPT3, MT_NLG, SMALL])
@pytest.mark.parametrize("seq", [128, 2048])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_published_formulas(model, seq, tp):
    """Korthikanti et al., table 2, bytes of a layer over s b h."""
    hidden, heads = model
    scores = 5 * heads * seq / hidden
    rows = {
        ("none", False): 10 + 24 / tp + scores / tp,
        ("none", True): (34 + scores) / tp,
        ("selective", False): 10 + 24 / tp,
        ("selective", True): 34 / tp,
        ("full", False): 2,
        ("full", True): 2 / tp,
    }
    for (recompute, sequence_parallel), expected in rows.items():
        found = published(model, recompute, tp=tp, sequence_parallel=sequence_parallel, seq=seq)
        assert found == pytest.approx(expected, rel=1e-12), (recompute, sequence_parallel)


def test_one_rank_is_34_and_5_as_over_h():
    assert published(GPT3, "none") == 34 + 80
    assert published(GPT3, "selective") == 34


@pytest.mark.parametrize(("model", "saved"), [(GPT3, 0.70), (MT_NLG, 0.65)])
def test_published_savings_of_selective_recompute(model, saved):
    assert 1 - published(model, "selective") / published(model, "none") == pytest.approx(saved, abs=0.005)


def test_masks_are_the_only_difference_that_dropout_makes():
    split = {"batch": 1, "seq_len": 32}
    block = gpt(*SMALL)
    for name in IMPLEMENTATIONS:
        without = block_tensors(block, Split(**split), implementation=name)
        with_dropout = block_tensors(block, Split(**split, dropout=True), implementation=name)
        new = [tensor for tensor in with_dropout if tensor not in without]
        assert {tensor.operator.split()[-1] for tensor in new} == {"dropout"}
        residual = sum(tensor.bytes for tensor in new if not tensor.operator.startswith("softmax"))
        assert residual == 2 * 32 * 64


def test_a_block_of_the_native_kernels():
    """8 R H + 2 R F + R (4 + heads) of fp32: the sum that the kernels document."""
    rows, block = 3 * 32, gpt(*SMALL)
    found = block_bytes(block, Split(batch=3, seq_len=32, activation_bytes=4))
    assert found == 4 * (8 * rows * 64 + 2 * rows * 256 + rows * (4 + 4))


def test_native_attention_leaves_little_to_selective_recompute():
    block, split = gpt(*GPT3), Split(batch=1, seq_len=2048)
    none, selective = (block_bytes(block, split, recompute=kind) for kind in ("none", "selective"))
    assert none - selective == 2048 * 96 * 4


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [gpt(*SMALL), LLAMA])
def test_order_of_the_kinds_and_of_the_splits(name, block):
    def size(recompute="none", **split):
        split = Split(**{"batch": 2, "seq_len": 64, **split})
        return block_bytes(block, split, implementation=name, recompute=recompute)

    assert size("full") == 2 * 2 * 64 * 64 < size("selective") <= size("none")
    assert size(tp=2, sequence_parallel=True) == size() / 2 < size(tp=2) < size()
    assert 1.9 * size() < size(batch=4) <= 2 * size()  # tables do not grow with the batch
    assert size(activation_bytes=4) > 1.5 * size()


def test_bytes_by_kind_feed_the_choice_of_a_budget():
    kinds = bytes_by_kind(gpt(*SMALL), Split(batch=2, seq_len=64), implementation="portable")
    assert list(kinds) == ["none", "selective", "full"]
    budget = 4 * kinds["selective"] + kinds["none"] - kinds["selective"]
    plan = plan_recompute("budget", 4, budget_bytes=budget, bytes_of=kinds.__getitem__)
    assert plan.kinds(4) == ("selective",) * 4


def test_edges():
    split = Split(batch=2, seq_len=16, activation_bytes=4, dropout=True)
    edges = edge_bytes(gpt(*SMALL), 100, split)
    tokens = 32
    assert edges.embedding == tokens * 64
    assert edges.final_norm == tokens * (64 + 2) * 4
    assert edges.head == tokens * 64 * 4
    assert edges.loss == tokens * (100 + 1) * 4
    assert edge_bytes(LLAMA, 100, Split(batch=2, seq_len=16, tp=2)).loss == tokens * 101 * 4 / 2


def test_block_of_a_planned_model():
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=16, qk_norm="head")
    layer = LayerShape(attention=attention, mlp=Mlp(ffn_hidden_size=96, gated=True))
    shape = ModelShape(
        name="x",
        family="llama",
        vocab_size=10,
        hidden_size=64,
        blocks=((1, layer),),
        max_seq_len=8,
        norm="rmsnorm",
    )
    assert block_of(shape, layer) == LLAMA

"""Attention over cut samples against one attention: results, gradients, traffic, buffers, balance."""

import re
from contextlib import contextmanager
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero import _compat, kernels
from ms_zero.comm import Group, local
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.parallel import ContextPart, RingAttention, UlyssesAttention, cut_context
from ms_zero.parallel.context import cut_spans, even_spans, positions_of, zigzag_spans
from ms_zero.plan.layout import FP32, MIXED, Layout
from ms_zero.plan.shapes import Attention
from ms_zero.plan.traffic import context_bytes
from ms_zero.testing import run_workers

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 48, 12, 5
SCALE = 0.7
# (method, degree, key-value heads)
CASES = [("ring", degree, heads) for degree in (2, 3, 4) for heads in (12, 2, 1)]
CASES += [("ulysses", 2, 12), ("ulysses", 2, 1), ("ulysses", 3, 3), ("ulysses", 4, 4), ("ulysses", 4, 2)]


def arrays(kv_heads, length=LENGTH, heads=HEADS, head_dim=HEAD_DIM, batch=BATCH):
    """q, k, v, gradient of the result, and the first position that each query sees."""
    rng = np.random.default_rng(kv_heads)
    q, k, v, grad = (
        rng.standard_normal((batch, length, count, head_dim)).astype(np.float32)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    borders = rng.random((batch, length)) < 0.1
    starts = np.maximum.accumulate(np.where(borders, np.arange(length), 0), 1).astype(np.int32)
    return q, k, v, grad, starts


def attend(attention, q, k, v, grad, starts, dtype=ms.float32):
    """Result and gradients as float64 arrays."""
    leaves = [Tensor(x).astype(dtype) for x in (q, k, v)]
    for leaf in leaves:
        leaf.requires_grad_(True)
    with _compat.tape():
        out = attention(*leaves, None if starts is None else Tensor(starts))
    _compat.backward(out, Tensor(grad).astype(dtype))
    found = [out, *map(_compat.gradient, leaves)]
    assert all(each.dtype == dtype for each in found)
    return [each.astype(ms.float32).asnumpy().astype(np.float64) for each in found]


def cell_of(method, part):
    if method == "ring":
        return RingAttention(SCALE, part)
    return UlyssesAttention(kernels.CausalAttention(SCALE), part)


def difference(comm, group, method, kv_heads, *, documents, dtype=ms.float32):
    """Largest difference of this rank's results and gradients from one attention, relative to their size."""
    q, k, v, grad, starts = arrays(kv_heads)
    expected = attend(kernels.CausalAttention(SCALE), q, k, v, grad, starts if documents else None, dtype)
    part = ContextPart(comm, group, method)
    own = [take(part, x) for x in (q, k, v, grad)]
    seen = None if not documents else starts if method == "ulysses" else part.own(starts)
    found = attend(cell_of(method, part), *own, seen, dtype)
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(mine - take(part, whole)).max() / np.abs(whole).max()) for mine, whole in pairs)


def take(part, x):
    return np.concatenate([x[:, start:stop] for start, stop in part.spans(x.shape[1])], 1)


def subgroup(comm, degree):
    """Ranks 0 ... degree - 1, with two ranks also 2 and 3; None on a rank in no group."""
    start = comm.rank // degree * degree
    return comm.new_group(range(start, start + degree), f"cp{degree}") if start + degree <= 4 else None


def traffic(comm, group, method, kv_heads, dtype):
    """Bytes that this rank sent in forward and backward, and by the formula."""
    q, k, v, grad, _ = arrays(kv_heads)
    part = ContextPart(comm, group, method)
    own = [take(part, x) for x in (q, k, v, grad)]
    comm.counters.reset()
    attend(cell_of(method, part), *own, None, dtype)
    shape = Attention(num_heads=HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, value_head_dim=HEAD_DIM)
    precision = FP32 if dtype == ms.float32 else MIXED
    layout = Layout(
        seq_len=LENGTH, micro_batch_size=BATCH, cp=group.size, context=method, precision=precision
    )
    ops = {op for op, _ in comm.counters.bytes}
    assert ops == ({"send", "recv"} if method == "ring" else {"all_to_all"}), ops
    return [comm.counters.total_bytes(), context_bytes(shape, layout)]


def buffers(comm, group, method, length):
    """[bytes that memory rose by, those of the largest tensor that a kernel of attention was given]."""
    q, k, v, grad, _ = arrays(1, length, heads=2, head_dim=16, batch=1)
    part = ContextPart(comm, group, method)
    own = [take(part, x) for x in (q, k, v, grad)]
    del q, k, v, grad
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = peak_memory()
    with watched_kernels() as sizes:
        attend(cell_of(method, part), *own, None)
    return [peak_memory() - before, max(sizes)]


@contextmanager
def watched_kernels():
    """Sizes of all tensors that native kernels are called with."""
    sizes, call = [], cpu.call

    def watching(name, *arguments):
        sizes.extend(each.nbytes for each in arguments if isinstance(each, Tensor))
        return call(name, *arguments)

    cpu.call = watching
    try:
        yield sizes
    finally:
        cpu.call = call


def peak_memory():
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def job(comm):
    groups = {degree: subgroup(comm, degree) for degree in (2, 3, 4)}
    report = {"differences": {}, "half": {}, "traffic": {}, "buffers": {}}
    for method, degree, kv_heads in CASES:
        group = groups[degree]
        if group is None:
            continue
        name = f"{method} {degree} {kv_heads}"
        for documents in (False, True):
            found = difference(comm, group, method, kv_heads, documents=documents)
            report["differences"][f"{name} {documents}"] = found
        report["traffic"][name] = traffic(comm, group, method, kv_heads, ms.float32)
    for method in ("ring", "ulysses"):
        settings = {"documents": True, "dtype": ms.float16}
        report["half"][method] = difference(comm, groups[4], method, 4, **settings)
        report["traffic"][f"{method} fp16"] = traffic(comm, groups[4], method, 4, ms.float16)
        report["buffers"][method] = [buffers(comm, groups[2], method, length) for length in (2048, 4096)]
    return report


@pytest.fixture(scope="module")
def reports():
    return run_workers(4, job, timeout_s=300)


def test_results_and_gradients_are_those_of_one_attention(reports):
    found = {name: worst for report in reports for name, worst in report["differences"].items()}
    assert len(found) == 2 * len(CASES)
    assert all(worst < 2e-6 for report in reports for worst in report["differences"].values()), found


def test_16_bits_are_rounded_once(reports):
    assert all(worst < 2e-3 for report in reports for worst in report["half"].values())


def test_every_rank_sends_what_the_planner_says(reports):
    for report in reports:
        for name, (sent, expected) in report["traffic"].items():
            assert sent == expected, name


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_no_buffer_grows_with_the_square_of_the_sequence(reports, method):
    """Twice the tokens take about twice the memory, far from that of one head's scores."""
    for report in reports:
        (short, _), (long, largest) = report["buffers"][method]
        own_scores = 4096 // 2 * 4096 * 4  # of one head and the own queries
        assert long < own_scores / 2 and largest < own_scores / 8
        assert long < 2.5 * short + 2**20


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_work_in_every_turn(degree):
    length = 16 * degree
    places = [positions_of(zigzag_spans(length, degree, index)) for index in range(degree)]
    assert sorted(np.concatenate(places).tolist()) == list(range(length))
    for turn in range(degree):
        seen = [
            int((places[index][:, None] >= places[(index - turn) % degree][None]).sum())
            for index in range(degree)
        ]
        assert len(set(seen)) == 1
    even = [positions_of(even_spans(length, degree, index)) for index in range(degree)]
    assert np.concatenate(even).tolist() == list(range(length))


def test_zigzag_is_the_published_order():
    assert [zigzag_spans(8, 2, index) for index in (0, 1)] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]


@pytest.mark.parametrize("spans_of", [zigzag_spans, even_spans])
def test_a_length_that_does_not_divide_is_refused(spans_of):
    with pytest.raises(UserError, match="does not divide a sample of 9 tokens: pad it"):
        spans_of(9, 2, 0)


def test_parts_of_ranges():
    spans = ((2, 5), (10, 14))
    assert cut_spans(spans, 0, 7) == spans
    assert cut_spans(spans, 1, 4) == ((3, 5), (10, 11))
    assert cut_spans(spans, 3, 5) == ((10, 12),) and cut_spans(spans, 2, 2) == ()
    for length, degree, inner in ((24, 3, 2), (48, 4, 3)):
        for index in range(degree):
            spans, size = zigzag_spans(length, degree, index), length // degree // inner
            parts = [cut_spans(spans, n * size, (n + 1) * size) for n in range(inner)]
            joined = np.concatenate([positions_of(part) for part in parts])
            assert joined.tolist() == positions_of(spans).tolist()


def test_one_rank_has_everything():
    comm = local()
    part = ContextPart(comm, comm.world)
    tokens = np.arange(10).reshape(2, 5)
    assert part.own(tokens).tolist() == tokens.tolist()
    q, k, v, grad, starts = arrays(2)
    ring = attend(RingAttention(SCALE, part), q, k, v, grad, starts)
    one = attend(kernels.CausalAttention(SCALE), q, k, v, grad, starts)
    assert max(np.abs(a - b).max() for a, b in zip(ring, one, strict=True)) < 1e-5


def test_heads_that_cannot_be_shared_are_refused():
    part = ContextPart(local(), Group("cp", (0, 1, 2, 3, 4), 0), "ulysses")
    cell = UlyssesAttention(kernels.CausalAttention(SCALE), part)
    x, y = Tensor(np.zeros((1, 2, 10, 4), np.float32)), Tensor(np.zeros((1, 2, 2, 4), np.float32))
    with pytest.raises(UserError, match="10 heads and 2 key-value heads cannot be shared between 5 ranks"):
        cell(x, y, y)


def test_a_model_with_attention_of_its_own_is_refused():
    with pytest.raises(UserError, match=r"Dense has no kernels\.CausalAttention"):
        cut_context(nn.Dense(2, 2), ContextPart(local(), Group("cp", (0, 1), 0)))

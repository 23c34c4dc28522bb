"""Borders, fp32 Cells, hooks: what `apply` does to plain Cells that know nothing of us."""

import collections
import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_zero import _compat, kernels
from ms_zero.errors import UserError
from ms_zero.precision.autocast import apply, fp32_parameters, keeps_fp32
from ms_zero.precision.cast import round_array
from ms_zero.precision.policy import Policy, policy

RNG = np.random.default_rng(0)
GRID = policy("bf16")
HALF = policy("fp16")


def tensor(*shape):
    return Tensor(RNG.standard_normal(shape, np.float32))


def on_grid(x):
    values = x.asnumpy() if isinstance(x, Tensor) else x
    return np.array_equal(round_array(values), values)


class Probe(nn.Cell):
    """A leaf that returns what it is given, and remembers it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def construct(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return args[0] if len(args) == 1 else args


class Around(nn.Cell):
    def __init__(self, *cells):
        super().__init__()
        self.inner = nn.CellList(list(cells))

    def construct(self, x, *args, **kwargs):
        for cell in self.inner:
            x = cell(x, *args, **kwargs)
        return x


class Scaled(nn.Cell):
    """A leaf with arithmetic that leaves the grid."""

    def construct(self, x):
        return x * 1.01


class Residual(nn.Cell):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def construct(self, x):
        return x + self.inner(x)


class Mlp(nn.Cell):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm((width,))
        self.up, self.act, self.down = nn.Dense(width, 2 * width), nn.GELU(), nn.Dense(2 * width, width)

    def construct(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Cell):
    """Two blocks and a loss."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.CellList([Mlp(width), Mlp(width)])
        self.loss = nn.MSELoss()

    def construct(self, x, y):
        for block in self.blocks:
            x = block(x)
        return self.loss(x, y)


# --- what is converted ----------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_root_arguments_are_converted_wherever_they_are(chosen):
    probe = Probe()
    apply(Around(probe), chosen, "CPU").remove()
    root = Around(probe)
    handle = apply(root, chosen, "CPU")
    pair = collections.namedtuple("Pair", "a b")
    ids, flag, scalar = Tensor(np.arange(3, dtype=np.int32)), Tensor(True), Tensor(np.float32(1.001))
    nested = (tensor(2), [tensor(2)])
    root(tensor(3), nested, pair(tensor(2), ids), ids=ids, k={"x": tensor(2)}, flag=flag, s=scalar)
    handle.remove()
    (x, (y, (z,)), named), kwargs = probe.seen[0]
    working = chosen.working("CPU")
    for found in (x, y, z, named.a, kwargs["k"]["x"]):
        assert found.dtype == working.dtype
        assert working.grid is None or on_grid(found)
    assert type(named) is pair
    assert named.b is ids
    assert kwargs["ids"] is ids
    assert kwargs["flag"] is flag
    assert kwargs["s"] is scalar


def test_parameters_among_arguments_are_left_alone():
    class Owner(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(tensor(4, 4), name="w")
            self.probe = Probe()

        def construct(self, x):
            return self.probe(x, self.weight)[0]

    for chosen in (GRID, HALF):
        owner = Owner()
        apply(owner, chosen, "CPU")
        owner(tensor(4))
        assert owner.probe.seen[0][0][1] is owner.weight


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_what_a_cell_keeps_in_fp32_passes_its_borders_untouched(chosen):
    class Carrying(nn.Cell):
        fp32_arguments, fp32_outputs = ("loss",), (1,)

        def construct(self, x, *, loss):
            return x, loss

    class Root(nn.Cell):
        def __init__(self):
            super().__init__()
            self.leaf = Carrying()

        def construct(self, x):
            return self.leaf(x, loss=loss)

    loss = tensor(3)
    root = Root()
    apply(root, chosen, "CPU")
    x, carried = root(tensor(3))
    assert carried.dtype == ms.float32 and carried.asnumpy().tobytes() == loss.asnumpy().tobytes()
    assert x.dtype == chosen.working("CPU").dtype and (chosen is HALF or on_grid(x))


def test_leaf_and_block_outputs_are_on_the_grid_but_not_those_of_the_root():
    inner = Residual(Scaled())
    root = Around(inner, probe := Probe(), Scaled())
    apply(root, GRID, "CPU")
    out = root(tensor(64))
    assert on_grid(probe.seen[0][0][0])
    assert on_grid(out)  # a leaf's
    ends_outside = Residual(Around(Scaled()))
    apply(ends_outside, GRID, "CPU")
    assert not on_grid(ends_outside(tensor(64)))


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_an_operator_of_ours_is_a_leaf_however_it_is_built(chosen):
    class Scores(nn.Cell):
        def __init__(self):
            super().__init__()
            self.act, self.factor = kernels.GELU(), tensor(64)

        def construct(self, x):
            return self.act(x * self.factor)

    root, seen = Scores(), []
    assert list(root.act.cells())
    apply(root, chosen, "CPU")
    root.act.register_forward_pre_hook(lambda cell, args: seen.append(args[0]))
    root(tensor(64))
    assert seen[0].dtype == chosen.working("CPU").dtype
    assert chosen is HALF or on_grid(seen[0])


def test_a_single_leaf_as_root():
    cell = Scaled()
    apply(cell, GRID, "CPU")
    assert on_grid(cell(tensor(64)))
    cell = Scaled()
    apply(cell, HALF, "CPU")
    assert cell(tensor(64)).dtype == ms.float16


def test_under_fp32_nothing_is_registered():
    cell = Net()
    handle = apply(cell, policy("fp32"), "CPU")
    assert handle.num_hooks == 0
    apply(cell, Policy(reduce="bf16"), "CPU")
    x = tensor(8)
    probe = Probe()
    apply(probe, policy("fp32"), "CPU")
    assert probe(x) is x


# --- fp32 Cells and losses ------------------------------------------------------------------------

FP32_CELLS = [
    lambda: nn.LayerNorm((4,)),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm2d(4),
    lambda: nn.Softmax(),
    lambda: nn.LogSoftmax(),
    lambda: mint.nn.LayerNorm(4),
    lambda: mint.nn.Softmax(-1),
    lambda: nn.MSELoss(),
    lambda: nn.CrossEntropyLoss(),
    lambda: mint.nn.CrossEntropyLoss(),
    lambda: kernels.CrossEntropySum(),
]


@pytest.mark.parametrize("make", FP32_CELLS)
def test_known_cells_keep_fp32(make):
    assert keeps_fp32(make())


def test_other_cells_do_not():
    for cell in (nn.Dense(2, 2), nn.Embedding(2, 2), nn.GELU(), nn.Dropout(p=0.5), nn.Conv2d(1, 1, 1), Net()):
        assert not keeps_fp32(cell)


def test_models_of_ours_declare_their_norms():
    from ms_zero.models.layers import LayerNorm, Linear, RMSNorm

    assert keeps_fp32(LayerNorm(4, eps=1e-5, target=None))
    assert keeps_fp32(RMSNorm(4, eps=1e-5, target=None))
    assert not keeps_fp32(Linear(2, 2, bias=True, init_std=1.0))


@pytest.mark.parametrize("by", ["class", "predicate", "attribute"])
@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_fp32_cells_compute_in_fp32_and_return_working(by, chosen, make_working):
    """1 + 1e-6 - 1 is 0 in 16 bits."""

    class Delicate(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inside = Probe()
            self.tiny = Parameter(Tensor(np.full(4, 1e-6, np.float32)), name="tiny")

        def construct(self, x):
            x, moved = self.inside(x, x + self.tiny)
            return moved - x

    delicate = Delicate()
    delicate.keeps_fp32 = by == "attribute"
    fp32 = {"class": [Delicate], "predicate": [lambda cell: hasattr(cell, "tiny")], "attribute": []}[by]
    root = Around(Scaled(), delicate)
    assert fp32_parameters(root, fp32) == {"inner.1.tiny"}
    apply(root, chosen, "CPU", fp32=fp32)
    make_working(root, chosen, fp32=fp32)
    out = root(Tensor(np.ones(4, np.float32)))
    (args, _), = delicate.inside.seen
    assert [x.dtype for x in args] == [ms.float32] * 2
    assert out.dtype == chosen.working("CPU").dtype
    assert (out.asnumpy() > 5e-7).all()
    assert chosen is HALF or on_grid(out)


def test_names_of_fp32_parameters():
    net = Net()
    names = {f"blocks.{i}.norm.{part}" for i in (0, 1) for part in ("gamma", "beta")}
    assert fp32_parameters(net) == names
    assert fp32_parameters(net, [nn.Dense]) == {name for name, _ in net.parameters_and_names()}


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_a_loss_is_fp32_and_not_rounded(chosen):
    class Inner(nn.Cell):
        """The loss leaves through two Cells."""

        def __init__(self):
            super().__init__()
            self.loss = nn.MSELoss(reduction="none")

        def construct(self, x, y):
            return self.loss(x, y)

    root = Around(Inner())
    apply(root, chosen, "CPU")
    x, y = tensor(100), tensor(100)
    loss = root(x, y)
    assert loss.dtype == ms.float32
    low = round_array if chosen is GRID else lambda values: values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(loss.asnumpy(), (low(x.asnumpy()) - low(y.asnumpy())) ** 2)
    assert not on_grid(loss)


def test_a_sum_beyond_fp16_survives_as_loss():
    class Summed(nn.Cell):
        def __init__(self):
            super().__init__()
            self.loss = kernels.CrossEntropySum()

        def construct(self, logits, labels):
            return self.loss(logits, labels)

    root = Summed()
    apply(root, HALF, "CPU")
    logits = np.zeros((5000, 2), np.float32)
    logits[:, 0] = 100.0
    loss = root(Tensor(logits), Tensor(np.ones(5000, np.int32)))
    assert float(loss.asnumpy()) == pytest.approx(5e5)


# --- gradients ------------------------------------------------------------------------------------


class Recording(_compat.function_class):
    @staticmethod
    def forward(ctx, x, grads):
        ctx.grads = grads
        return x * 3.001

    @staticmethod
    def backward(ctx, grad):
        ctx.grads.append(grad)
        return grad * 3.001, None


class ByFunction(nn.Cell):
    def __init__(self):
        super().__init__()
        self.grads = []

    def construct(self, x):
        return Recording.apply(x, self.grads)


class ByBprop(ByFunction):
    def construct(self, x):
        return x * 3.001

    def bprop(self, x, out, dout):
        self.grads.append(dout)
        return (dout * 3.001,)


@pytest.mark.parametrize(("leaf", "how"), [(ByFunction, "tape"), (ByFunction, "grad"), (ByBprop, "grad")])
def test_gradients_are_rounded_at_every_border(leaf, how):
    first, second = leaf(), leaf()
    root = Around(first, second, Probe())
    apply(root, GRID, "CPU")
    x, dout = tensor(64), tensor(64)
    if how == "tape":
        x.requires_grad_(True)
        with _compat.tape():
            out = root(x)
        _compat.backward(out, dout)
        grad = x._grad
    else:
        grad = ms.grad(lambda x: (root(x) * dout).sum())(x)
    after_second = round_array(dout.asnumpy())
    np.testing.assert_array_equal(second.grads[0].asnumpy(), after_second)
    after_first = round_array(after_second * np.float32(3.001))
    np.testing.assert_array_equal(first.grads[0].asnumpy(), after_first)
    np.testing.assert_array_equal(grad.asnumpy(), round_array(after_first * np.float32(3.001)))


def test_each_reader_rounds_its_part_of_the_gradient():
    class Fork(nn.Cell):
        def __init__(self):
            super().__init__()
            self.source, self.left, self.right = Scaled(), ByFunction(), ByFunction()

        def construct(self, x):
            x = self.source(x)
            return self.left(x) + self.right(x)

    root = Fork()
    apply(root, GRID, "CPU")
    x, dout = tensor(64), tensor(64)
    x.requires_grad_(True)
    with _compat.tape():
        out = root(x)
    _compat.backward(out, dout)
    part = round_array(round_array(dout.asnumpy()) * np.float32(3.001))
    expected = round_array(round_array(part + part) * np.float32(1.01))
    np.testing.assert_array_equal(x._grad.asnumpy(), expected)


def test_readers_of_one_tensor_share_its_storage():
    """Query, key and value projections must not each save a copy of their input."""
    probes = Probe(), Probe()

    class Fork(nn.Cell):
        def __init__(self):
            super().__init__()
            self.source = Scaled()
            self.probes = nn.CellList(list(probes))

        def construct(self, x):
            x = self.source(x)
            return [probe(x) for probe in self.probes]

    root = Fork()
    apply(root, GRID, "CPU")
    out = root(tensor(64))
    first, second = (probe.seen[0][0][0] for probe in probes)
    assert first.data_ptr() == second.data_ptr() == out[0].data_ptr()


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_tape_and_value_and_grad_agree_bitwise(chosen, make_working, gradients):
    net = Net()
    make_working(net, chosen)
    apply(net, chosen, "CPU")
    x, y = tensor(5, 16), tensor(5, 16)
    loss, found = gradients(net, x, y)
    weights = net.trainable_params()
    other_loss, other = ms.value_and_grad(net, None, ms.ParameterTuple(weights))(x, y)
    assert float(loss.asnumpy()) == float(other_loss.asnumpy())
    for (name, grad), second in zip(found.items(), other, strict=True):
        np.testing.assert_array_equal(grad.asnumpy(), second.asnumpy(), err_msg=name)


class Recomputed(_compat.function_class):
    """Runs a cell without a tape and again in backward."""

    @staticmethod
    def forward(ctx, x, cell):
        ctx.cell = cell
        ctx.save_for_backward(x)
        with _compat.no_grad():
            return cell(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        leaf = ops.stop_gradient(x)
        leaf.requires_grad_(True)
        with _compat.tape():
            out = ctx.cell(leaf)
        _compat.backward(out, grad)
        return leaf._grad, None


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_recomputed_blocks_give_the_same_bits(chosen, make_working, gradients):
    class Checkpointed(Net):
        recompute_blocks = False

        def construct(self, x, y):
            for block in self.blocks:
                x = Recomputed.apply(x, block) if self.recompute_blocks else block(x)
            return self.loss(x, y)

    net = Checkpointed()
    make_working(net, chosen)
    apply(net, chosen, "CPU")
    x, y = tensor(5, 16), tensor(5, 16)
    x.requires_grad_(True)
    plain_loss, plain = gradients(net, x, y)
    net.recompute_blocks = True
    loss, found = gradients(net, x, y)
    assert float(loss.asnumpy()) == float(plain_loss.asnumpy())
    for name, grad in plain.items():
        np.testing.assert_array_equal(found[name].asnumpy(), grad.asnumpy(), err_msg=name)


@pytest.mark.parametrize("chosen", [GRID, HALF])
def test_backward_reads_the_parameter_that_is_there_then(chosen, make_working):
    """No copy of a weight is saved: the engine may drop working copies between forward and backward."""
    net = Around(nn.Dense(4, 4, has_bias=False))
    make_working(net, chosen)
    apply(net, chosen, "CPU")
    x = tensor(2, 4)
    x.requires_grad_(True)
    with _compat.tape():
        out = net(x)
    weight = net.inner[0].weight
    weight.data = Tensor(np.zeros((4, 4), weight.asnumpy().dtype))
    _compat.backward(out, ops.ones_like(out))
    assert not x._grad.asnumpy().any()


# --- hooks ----------------------------------------------------------------------------------------


def test_removing_the_handle_restores_the_plain_model(gradients):
    net, x, y = Net(), tensor(5, 16), tensor(5, 16)
    plain = gradients(net, x, y)
    handle = apply(net, GRID, "CPU")
    assert handle.num_hooks > 0
    changed = gradients(net, x, y)
    assert any(not np.array_equal(changed[1][n].asnumpy(), g.asnumpy()) for n, g in plain[1].items())
    handle.remove()
    handle.remove()
    assert handle.num_hooks == 0
    for name, grad in gradients(net, x, y)[1].items():
        np.testing.assert_array_equal(grad.asnumpy(), plain[1][name].asnumpy())
    apply(net, GRID, "CPU")


def test_no_hook_is_added_and_no_tensor_left_by_calls(gradients):
    net, x, y = Net(), tensor(5, 16), tensor(5, 16)
    handle = apply(net, GRID, "CPU")
    before, counts = handle.num_hooks, []
    for _ in range(8):
        gradients(net, x, y)
        gc.collect()
        counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    assert counts[2] == counts[-1]
    # Root, list and blocks have one each, the four Cells of a block and the loss two.
    assert handle.num_hooks == before == 1 + 1 + 2 * (1 + 4 * 2) + 2


def test_a_cell_in_two_places_is_hooked_once():
    shared = Scaled()
    root = Around(shared, shared)
    # Both hooks of the leaf, entry of the root, exit of the list.
    assert apply(root, GRID, "CPU").num_hooks == 4
    x = tensor(64)
    once = round_array(round_array(x.asnumpy()) * np.float32(1.01))
    np.testing.assert_array_equal(root(x).asnumpy(), round_array(once * np.float32(1.01)))


def test_a_second_policy_is_refused():
    net = Net()
    apply(net.blocks[0], GRID, "CPU")
    with pytest.raises(UserError, match="Mlp in Net computes under a policy already: call remove"):
        apply(net, HALF, "CPU")


def test_graph_mode_is_refused():
    net = Net()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(UserError, match="PyNative"):
            apply(net, GRID, "CPU")
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)

"""Split experts against whole ones: results, gradients, traffic; ranks that get no token; what is refused."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_zero import _compat
from ms_zero.comm import local
from ms_zero.errors import UserError
from ms_zero.models.init import init_rules, initial_values
from ms_zero.models.layers import name_parameters_by_path
from ms_zero.models.moe import Mixture, MoE
from ms_zero.models.routing import Rules
from ms_zero.parallel import Placements, split_experts
from ms_zero.testing import run_workers

EXPERTS, HIDDEN, INNER, TOP_K = 12, 8, 6, 3
BATCH, LENGTH = 2, 5
ROWS = BATCH * LENGTH * TOP_K


class Net(nn.Cell):
    """One layer of experts after a matrix, so that tokens depend on something that is trained."""

    def __init__(self, capacity=None, first_only=False):
        super().__init__()
        rules = Rules(top_k=TOP_K, capacity_factor=capacity, balance_coefficient=0.1, z_coefficient=0.01)
        mixture = Mixture(num_experts=EXPERTS, ffn_hidden_size=INNER, rules=rules, shared_ffn_hidden_size=4)
        self.scale = Parameter(Tensor(np.full(HIDDEN, 1.5, np.float32)))
        self.layer = MoE(HIDDEN, mixture, init_std=0.5, residual_std=0.5, target=None)
        name_parameters_by_path(self)
        self.first_only = first_only

    def construct(self, x):
        return self.layer(x * self.scale)


def net(placements_of=lambda model: Placements(), **options):
    """A model with values, and where its parameters lie after a function has split it."""
    model = Net(**options)
    rules = init_rules(model.layer)
    shapes = {name: tuple(param.shape) for name, param in model.layer.parameters_and_names()}
    placements = placements_of(model)
    for name, param in model.layer.parameters_and_names():
        size = int(np.prod(shapes[name]))
        whole = initial_values(rules[name], name, shapes[name], 7, 0, size).reshape(shapes[name])
        if name == "router.weight" and options.get("first_only"):
            whole[:TOP_K], whole[TOP_K:] = np.abs(whole[:TOP_K]) + 1, -1  # of positive tokens
        box = placements.box(f"layer.{name}", tuple(param.shape))
        param.data = Tensor(box.take(whole).copy())
    return model, placements


def tokens(rank, first_only=False):
    x = np.random.default_rng(rank).standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32)
    return np.abs(x) if first_only else x


def run(model, x):
    """Result, auxiliary loss, gradient of the tokens and of every parameter, for a loss of both."""
    x = _compat.leaf(Tensor(x), requires_grad=True)
    with _compat.tape():
        y, aux = model(x)
        weights = Tensor(np.linspace(-1, 2, y.size, dtype=np.float32).reshape(y.shape))
        loss = (y * weights).sum() + aux.sum()
    params = dict(model.parameters_and_names())
    _compat.clear_grads(params.values())
    _compat.backward(loss)
    grads = {name: _compat.gradient(param).asnumpy() for name, param in params.items()}
    return y.asnumpy(), aux.asnumpy(), _compat.gradient(x).asnumpy(), grads


def compare(comm, group, **options):
    """How far split experts are from whole ones on the same tokens, and what the exchange sent."""
    whole, _ = net(**options)
    split, placements = net(lambda model: split_experts(model, [model.layer], comm, group), **options)
    x = tokens(comm.rank, options.get("first_only", False))
    expected = run(whole, x)
    before = comm.counters.total_bytes(op="all_to_all", group=group.name)
    found = run(split, x)
    sent = comm.counters.total_bytes(op="all_to_all", group=group.name) - before
    errors = {"bits": float(not np.array_equal(found[0], expected[0]))}
    for name, a, b in zip(("y", "aux", "dx"), found, expected, strict=False):
        errors[name] = float(np.abs(a - b).max())
    for name, grad in found[3].items():
        whole_grad, placement = expected[3][name], placements.by_name.get(name)
        if placement is not None:  # of the tokens of all ranks
            total = comm.all_reduce(Tensor(whole_grad), group).asnumpy()
            whole_grad = placement.box.take(total)
        errors[name] = float(np.abs(grad - whole_grad).max() / np.abs(whole_grad).max().clip(1e-3))
    ids = whole.layer.router(Tensor(x) * whole.scale).ids.asnumpy().reshape(-1)
    here = ids // (EXPERTS // group.size) == group.index
    leaving = int((ids >= 0).sum() - here[ids >= 0].sum())
    return {"errors": errors, "sent": sent, "leaving": leaving}


def job(comm):
    found = {}
    for degree in (2, 3, 4):
        first = comm.rank // degree * degree
        ranks = range(first, min(first + degree, comm.world_size))
        if len(ranks) < degree:
            continue
        group = comm.new_group(ranks, f"ep{degree}")
        for name, options in (
            ("plain", {}),
            ("capacity", {"capacity": 0.5}),
            ("first only", {"first_only": True}),
        ):
            found[f"{degree} {name}"] = compare(comm, group, **options)
        found[f"{degree} errors"] = errors_of_ranks(comm, group)
    return found


def errors_of_ranks(comm, group):
    """What a model with values that differ between ranks is after splitting; and what cannot be split."""
    model, _ = net()
    for _, param in model.layer.experts.parameters_and_names():
        param.set_data(param + float(comm.rank))
    expected = comm.broadcast(model.layer.experts.up_proj.data, group.ranks[0], group).asnumpy()
    placements = split_experts(model, [model.layer], comm, group)
    box = placements.box("layer.experts.up_proj", model.layer.experts.up_proj.shape)
    same = np.array_equal(model.layer.experts.up_proj.asnumpy(), box.take(expected))
    try:
        split_experts(model, [], comm, group)
    except UserError as error:
        return [same, model.layer.experts.num_experts * group.size, str(error)]


@pytest.fixture(scope="module")
def found():
    return run_workers(4, job)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", ["plain", "capacity", "first only"])
def test_split_experts_give_results_and_gradients_of_whole_ones(found, degree, name):
    members = found[: degree if degree == 3 else 4]
    for result in members:
        errors = dict(result[f"{degree} {name}"]["errors"])
        assert errors.pop("bits") == 0  # rows do not depend on their neighbours
        assert max(errors.values()) < 2e-6, errors


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_four_times_the_rows_that_leave_are_sent_and_one_number_for_each_expert(found, degree):
    for result in found[: degree if degree == 3 else 4]:
        for name in ("plain", "capacity", "first only"):
            case = result[f"{degree} {name}"]
            counts = 4 * (EXPERTS - EXPERTS // degree)
            assert case["sent"] >= counts and case["leaving"] <= ROWS
            # Rows go away, and what its experts made of others' goes back; backward the same again.
            assert (case["sent"] - counts) % (2 * 4 * HIDDEN) == 0
    for name in ("plain", "capacity", "first only"):
        cases = [result[f"{degree} {name}"] for result in found[:degree]]
        sent = sum(case["sent"] for case in cases) - degree * 4 * (EXPERTS - EXPERTS // degree)
        assert sent == 4 * sum(case["leaving"] for case in cases) * HIDDEN * 4


def test_ranks_without_tokens_take_part(found):
    assert [result["4 first only"]["leaving"] for result in found] == [0, ROWS, ROWS, ROWS]


def test_values_of_the_first_rank_are_split_and_a_model_without_experts_is_refused(found):
    for degree in (2, 3, 4):
        same, num_experts, message = found[0][f"{degree} errors"]
        assert same and num_experts == EXPERTS
        assert message == "expert parallelism: Net has no layer of experts"


def test_one_rank_keeps_the_plain_layer():
    model, comm = Net(), local()
    assert split_experts(model, [model.layer], comm, comm.world).by_name == {}
    assert type(model.layer.dispatcher).__name__ == "LocalDispatcher"

"""Three lines around anybody's model and anybody's loop."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_zero.zero.api
from ms_zero.comm import ProcessMesh, local
from ms_zero.errors import UserError
from ms_zero.mesh import Mesh
from ms_zero.models import GPT
from ms_zero.models.layers import Linear
from ms_zero.optim import SGD, AdamW
from ms_zero.precision.scaler import StaticLossScaler
from ms_zero.testing import run_workers
from ms_zero.zero import Options, shard, wrap_classes

ROWS, LR = 12, 0.1
RNG = np.random.default_rng(5)
IMAGES = RNG.standard_normal((ROWS, 3, 6, 6)).astype(np.float32)
IDS = RNG.integers(0, 9, ROWS).astype(np.int32)
TARGETS = RNG.standard_normal((ROWS, 4)).astype(np.float32)


class Attention(nn.Cell):
    """A transformer layer of MindSpore's own parts."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.project = nn.LayerNorm((width,)), nn.Dense(width, 3 * width)
        self.out = mint.nn.Linear(width, width)

    def construct(self, hidden, *, scale):
        q, k, v = ops.split(self.project(self.norm(hidden)), hidden.shape[-1], axis=-1)
        weights = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * scale, -1)
        return hidden + self.out(ops.matmul(weights, v))


class Stranger(nn.Cell):
    """Convolution, batch statistics, layers; keyword arguments, a dict as result, tables of integers."""

    def __init__(self, seed=1):
        super().__init__()
        ms.set_seed(seed)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, has_bias=True), nn.BatchNorm2d(4)
        self.table, self.layers = nn.Embedding(9, 4), nn.CellList([Attention(4) for _ in range(2)])
        self.order = Parameter(Tensor(np.array([3, 1, 0, 2], np.int32)), name="order", requires_grad=False)
        self.mask = Parameter(Tensor(np.array([True, True, False, True])), name="mask", requires_grad=False)
        self.half = Parameter(Tensor(np.full(4, 1.5, np.float16)), name="half")

    def construct(self, images, *, ids):
        hidden = ops.relu(self.norm(self.conv(images))).reshape(images.shape[0], 4, -1).swapaxes(1, 2)
        hidden = hidden[..., :4] + self.table(ids).expand_dims(1)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        pooled = ops.gather(hidden.mean(1), self.order, 1)
        pooled = ops.masked_fill(pooled, ops.logical_not(self.mask), 0.25) * self.half.astype(ms.float32)
        return {"pooled": pooled, "extra": (hidden.mean(), None)}


def loss_of(model, part):
    images, ids, targets = Tensor(IMAGES[part]), Tensor(IDS[part]), Tensor(TARGETS[part])
    found = model(images, ids=ids)
    return ((found["pooled"] - targets) ** 2).mean() + 0.1 * found["extra"][0] ** 2


def statistics_of(model):
    return [p.asnumpy().copy() for p in model.norm.get_parameters() if not p.requires_grad]


def set_statistics(model, values):
    params = [p for p in model.norm.get_parameters() if not p.requires_grad]
    for param, value in zip(params, values, strict=True):
        param.set_data(Tensor(value))


def plain_training(parts, steps=3):
    """Of the mean over the parts, each with its own batch statistics; those of the first part are kept."""
    model = Stranger()
    model.set_train()
    params = model.trainable_params()
    for _ in range(steps):
        total = [0.0] * len(params)
        statistics = []
        for number, part in enumerate(parts):
            before = statistics_of(model)
            _, grads = ms.value_and_grad(lambda part=part: loss_of(model, part), None, params)()
            scaled = [grad.asnumpy().astype(np.float32) / len(parts) for grad in grads]
            total = [a + b for a, b in zip(total, scaled, strict=True)]
            if number == 0:
                statistics = statistics_of(model)
            set_statistics(model, before)
        for param, grad in zip(params, total, strict=True):
            param.set_data(Tensor((param.asnumpy() - np.float32(LR) * grad).astype(param.asnumpy().dtype)))
        set_statistics(model, statistics)
    return {name: param.asnumpy() for name, param in model.parameters_and_names()}


def distance(a, b):
    return np.abs(np.subtract(a, b, dtype=np.float64)).max()


def train_stranger(comm):
    """Names that differ from plain training, by stage; ranks other than the first start from other values."""
    per_rank = ROWS // comm.world_size
    parts = [slice(rank * per_rank, (rank + 1) * per_rank) for rank in range(comm.world_size)]
    expected = plain_training(parts)
    problems = []
    for stage in range(4):
        for through_value_and_grad in (False, True):
            cell = Stranger(seed=1 + comm.rank)
            cell.set_train()
            model = shard(cell, ProcessMesh(Mesh(dp_shard=comm.world_size), comm), stage=stage)
            optimizer = SGD(model)
            for _ in range(3):
                if through_value_and_grad:
                    with model.microbatch(last=True):
                        ms.value_and_grad(
                            lambda model=model: loss_of(model, parts[comm.rank]) / comm.world_size,
                            None,
                            cell.trainable_params(),
                        )()
                else:
                    with model.record():
                        loss = loss_of(model, parts[comm.rank])
                    model.backward(loss)
                optimizer.step(lr=LR)
            found = model.state_dict()
            assert found.keys() == expected.keys()
            problems += [
                f"stage {stage} value_and_grad {through_value_and_grad}: {name}"
                for name in expected
                # Rank 0 has the statistics of its own part; half is fp16 in plain training.
                if comm.rank == 0 or "moving" not in name
                if distance(found[name], expected[name]) > (2e-3 if name == "half" else 2e-5)
            ]
    return problems


def test_a_strangers_model_trains_in_every_stage():
    for world_size in (1, 2):
        assert run_workers(world_size, train_stranger, timeout_s=200) == [[]] * world_size


def on_one(cell=None, stage=3, **options):
    return shard(cell or Stranger(), ProcessMesh(Mesh(), local()), stage=stage, **options)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_state_dict_survives_a_round_trip(policy):
    first = on_one(Stranger(seed=3), policy=policy)
    values = first.state_dict()
    assert values["order"].tolist() == [3, 1, 0, 2] and values["mask"].dtype == bool
    second = on_one(Stranger(seed=4), stage=1, policy=policy)
    second.load_state_dict(values)
    for name, value in second.state_dict().items():
        np.testing.assert_array_equal(value, values[name])


def ranges(comm):
    """This rank's part of the state, as lists, and the whole."""
    model = shard(Stranger(), ProcessMesh(Mesh(dp_shard=comm.world_size), comm), stage=3)
    part = {
        name: [(a, b, np.asarray(v, np.float64).tolist()) for a, b, v in pieces]
        for name, pieces in model.state_dict(full=False).items()
    }
    whole = model.state_dict()
    return [part, {name: np.asarray(v, np.float64).reshape(-1).tolist() for name, v in whole.items()}]


def test_sharded_state_dicts_cover_everything_once():
    results = run_workers(3, ranges)
    whole = results[0][1]
    for name, values in whole.items():
        pieces = sorted(piece for part, _ in results for piece in part.get(name, []))
        assert [piece[0] for piece in pieces] == [0, *[piece[1] for piece in pieces[:-1]]], name
        assert [value for piece in pieces for value in piece[2]] == values


def test_wrong_state_dicts_are_refused():
    model = on_one()
    values = model.state_dict()
    for change, message in (
        ({"half": None}, "names differ from the model's: half"),
        ({"more": values["half"]}, "names differ from the model's: more"),
        ({"half": np.zeros(5)}, r"half is \[5\], the model's is \[4\]"),
        ({"order": np.zeros((2, 2))}, r"order is \[2, 2\], the model's is \[4\]"),
    ):
        given = {name: value for name, value in (values | change).items() if value is not None}
        with pytest.raises(UserError, match=message):
            model.load_state_dict(given)
    AdamW(model)
    with pytest.raises(UserError, match="load weights before the optimizer is made"):
        model.load_state_dict(values)


class Trained(nn.Cell):
    def __init__(self, value, **options):
        super().__init__()
        self.value = Parameter(Tensor(value), name="value", **options)

    def construct(self, x):
        return x * self.value


def test_what_cannot_be_sharded_is_refused():
    cell = Trained(np.ones(3, np.float32))
    on_one(cell)
    whole = nn.CellList([cell])
    for make, message in (
        (lambda: on_one(cell), "the model is sharded already"),
        (lambda: on_one(whole), "0 is sharded already"),
        (lambda: on_one(nn.ReLU()), "ReLU has no parameters"),
        (lambda: on_one(Trained(np.ones(3, np.int32))), "value cannot be trained, its dtype is Int32"),
        (lambda: on_one(Trained(np.ones(3, np.float32)), keep=lambda name: True), "keep= leaves it out"),
        (lambda: on_one(Trained(np.ones(3, np.float32)), stage=5), "stage is 5: expected 0, 1, 2 or 3"),
        (lambda: on_one(Trained(np.ones(3, np.float32)), policy="fp8"), "unknown policy 'fp8'"),
        (lambda: on_one(stage=1, options=Options(3, params_on_host=True)), "use stage 3"),
        (lambda: on_one(stage=2.0), "stage is 2.0: expected 0, 1, 2 or 3"),
        (lambda: on_one(policy=None), "policy is NoneType: expected fp32, bf16"),
        (lambda: on_one(cell.get_parameters), "cell is method: expected an nn.Cell"),
        (lambda: on_one(wrap=nn.Dense), "wrap is Dense: expected for example zero.wrap_classes"),
        (lambda: on_one(scaler=1024.0), "scaler is float: expected a LossScaler"),
        (lambda: shard(Trained(np.ones(3, np.float32)), Mesh()), "mesh is Mesh: expected comm.ProcessMesh"),
    ):
        with pytest.raises(UserError, match=message):
            make()


class TwoUses(nn.Cell):
    """One weight in a layer of ours and in an operator of MindSpore."""

    def __init__(self):
        super().__init__()
        self.layer = Linear(4, 4, bias=False, init_std=0.1)
        self.layer.weight = Parameter(Tensor(TARGETS[:4]), name="weight")

    def construct(self, x):
        return mint.matmul(self.layer(x), self.layer.weight)


def test_gradients_that_mindspore_cannot_add_are_explained():
    for policy in ("fp32", "bf16", "fp16"):
        model = shard(TwoUses(), ProcessMesh(Mesh(), local("CPU")), stage=3, policy=policy)
        with model.record():
            loss = model(Tensor(TARGETS)).astype(ms.float32).sum()
        if policy != "fp16":
            model.backward(loss)
            continue
        with pytest.raises(UserError, match="cannot add the gradients of the two: use it in one way only"):
            model.backward(loss)


def test_a_model_has_one_optimizer():
    for policy in ("fp32", "bf16"):
        model = on_one(policy=policy)
        AdamW(model)
        with pytest.raises(UserError, match="has an optimizer already"):
            SGD(model)


def test_values_without_storage_are_asked_for_part_by_part():
    shape = {"vocab_size": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 16}
    with pytest.raises(UserError, match="has no values: pass values="):
        on_one(GPT(**shape, max_seq_len=4))
    asked = []

    def values(name, start, stop):
        asked.append(stop - start)
        return np.arange(start, stop, dtype=np.float32)

    model = on_one(GPT(**shape, max_seq_len=4), values=values)
    assert sum(asked) == sum(int(np.prod(shape)) for shape in model.names.values())
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.reshape(-1), np.arange(value.size), err_msg=name)


class Scaled(nn.Cell):
    """Returns what ``form`` makes of a tensor."""

    def __init__(self, form=lambda x: x):
        super().__init__()
        self.weight, self.form = Parameter(Tensor(TARGETS[0]), name="weight"), form

    def construct(self, x):
        return self.form(ops.tanh(x * self.weight))


def disagree(comm):
    """What each rank is told when the ranks build different things."""
    told = []
    mesh = ProcessMesh(Mesh(dp_shard=2), comm)
    for make in (
        lambda: shard(Trained(np.ones(3 + comm.rank, np.float32)), mesh),
        lambda: shard(Trained(np.ones(3, np.float32), requires_grad=comm.rank == 0), mesh),
        lambda: shard(Trained(np.ones(3, np.float32)), mesh, stage=1 + comm.rank),
        lambda: shard(Trained(np.ones(3, np.float32)), mesh, options=Options(3, prefetch=comm.rank)),
        lambda: shard(nn.CellList([Scaled(), Scaled()]), mesh, wrap=[None, lambda *_: False][comm.rank]),
        lambda: shard(Scaled(), mesh, policy="fp16", fp32=[(), (Scaled,)][comm.rank]),
        lambda: shard(Scaled(), mesh, policy="fp16", scaler=StaticLossScaler(2.0 + comm.rank)),
    ):
        try:
            make()
            told.append("nothing")
        except UserError as error:
            told.append(str(error))
    return told


def test_ranks_that_build_different_models_are_told():
    for told in run_workers(2, disagree):
        assert all("rank 1 shards another model than rank 0" in line for line in told), told
        assert "value [" in told[0] and "stage=" in told[2]
        assert "a bucket of" in told[4] and "weight in Float" in told[5] and "loss scaling" in told[6]


@dataclass(frozen=True)
class Answer:
    found: Tensor
    count: int = 3


class Opaque:
    def __init__(self, found):
        self.found = found


class Chain(nn.Cell):
    """Blocks that return a tensor in an object."""

    def __init__(self, form):
        super().__init__()
        self.blocks = nn.CellList([Scaled(form) for _ in range(2)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x).found
        return x


def test_results_in_objects_are_followed_or_refused():
    reduced = {}
    for stage in (0, 3):
        model = on_one(Chain(Answer), stage)
        with model.record():
            loss = model(Tensor(TARGETS)).sum()
        model.backward(loss)
        model.reduce()
        slots = [(slot, bucket) for bucket in model.buckets for slot in bucket.layout.slots]
        reduced[stage] = {slot.name: slot.view(bucket.reduced.asnumpy()) for slot, bucket in slots}
    assert reduced[0].keys() == reduced[3].keys()
    for name, value in reduced[0].items():
        np.testing.assert_array_equal(value, reduced[3][name])
    model = on_one(Chain(Opaque), 3)
    model(Tensor(TARGETS))
    with model.record(), pytest.raises(UserError, match=r"blocks\.0 returns a Opaque, whose tensors cannot"):
        model(Tensor(TARGETS))


class Compiled(Scaled):
    @ms.jit
    def construct(self, x):
        return ops.tanh(x * self.weight)


def test_compiled_cells_are_refused_where_they_would_not_train():
    for stage, policy in ((3, "fp32"), (1, "bf16")):
        with pytest.raises(UserError, match=r"0 \(Compiled\) is compiled by mindspore.jit"):
            on_one(nn.CellList([Compiled()]), stage, policy=policy)
    on_one(Compiled(), 2)


class Counting(nn.Cell):
    """Its forward writes a float that is not trained."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(3, np.float32)), name="weight")
        self.mean = Parameter(Tensor(np.zeros(3, np.float32)), name="mean", requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.mean, x.mean(0))
        return x * self.weight


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_forward_writes_can_be_kept(stage):
    model = on_one(Counting(), stage, keep=lambda name: name == "mean", wrap=wrap_classes(Counting))
    for _ in range(2):
        with model.record():
            loss = model(Tensor(np.ones((2, 3), np.float32))).sum()
        model.backward(loss)
        model.drop_gradients()
    np.testing.assert_array_equal(model.state_dict()["mean"], 2.0)


def test_the_example_of_the_module_runs():
    source = ms_zero.zero.api.__doc__.split("Example::")[1]
    lines = [line[4:] for line in source.splitlines()]
    batches = [(Tensor(IMAGES), Tensor(TARGETS))] * 2

    class Image(nn.Cell):
        def __init__(self):
            super().__init__()
            self.body = nn.SequentialCell(nn.Flatten(), nn.Dense(108, 4))

        def construct(self, x):
            return self.body(x)

    names = {
        "ms_zero": ms_zero,
        "ProcessMesh": ProcessMesh,
        "Mesh": Mesh,
        "cell": Image(),
        "batches": batches,
        "loss_fn": nn.MSELoss(),
    }
    text = "\n".join(lines).replace('ms_zero.comm.connect("CPU")', "ms_zero.comm.local()")
    exec(compile(text, "example", "exec"), names)
    assert names["optimizer"].num_updates == 2

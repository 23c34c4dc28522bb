"""Cut models against whole ones: outputs, gradients, traffic; what cannot be cut is refused."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import _compat, kernels
from ms_zero.comm import ProcessMesh, local
from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.mesh import Mesh
from ms_zero.models.init import init_rules, initial_values, initialise
from ms_zero.parallel import (
    Column,
    Cut,
    Enter,
    OwnTokens,
    Region,
    Row,
    SplitSequence,
    Vocabulary,
    VocabularyCrossEntropySum,
    WholeSequence,
    parallelize,
)
from ms_zero.recipes.build import build_model
from ms_zero.recipes.tensor import cut_model
from ms_zero.testing import run_workers

VOCAB, WIDTH, LENGTH = 13, 8, 12


class Foreign(nn.Cell):
    """A user's model of MindSpore's parts: embeddings, dense layers, a parameter of its own."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(5)

        def values(*shape):
            return Tensor(rng.standard_normal(shape).astype(np.float32) * 0.5)

        self.embed = nn.Embedding(VOCAB, WIDTH, embedding_table=values(VOCAB, WIDTH))
        self.where = nn.Embedding(LENGTH, WIDTH, embedding_table=values(LENGTH, WIDTH))
        self.gain = Parameter(values(WIDTH), name="gain")
        self.blocks = nn.CellList([self.block(values) for _ in range(2)])
        self.head = nn.Dense(WIDTH, VOCAB, weight_init=values(VOCAB, WIDTH), has_bias=False)

    @staticmethod
    def block(values):
        block = nn.Cell()
        sizes = (WIDTH, 7), (7, WIDTH)
        layers = [
            nn.Dense(i, o, weight_init=values(o, i), bias_init=values(o), activation=act)
            for (i, o), act in zip(sizes, (ops.ReLU(), None), strict=True)
        ]
        block.mlp = nn.SequentialCell(*layers)
        return block

    def construct(self, ids, positions):
        x = (self.embed(ids) + self.where(positions)) * self.gain
        for block in self.blocks:
            x = x + block.mlp(x)
        return self.head(x)


FOREIGN_PLAN = {
    "embed": Vocabulary(),
    "where": OwnTokens(),
    "blocks.*.mlp": Enter(),
    "blocks.*.mlp.0": Column(),
    "blocks.*.mlp.1": Row(),
    "head": Column(enters=True),
}

# Plans that would compute with gradients or results that are summed twice, or never.
WRONG_REGIONS = [
    {"head": Column()},
    {"blocks.*.mlp": Enter(), "blocks.*.mlp.0": Column(enters=True)},
    {"blocks.*": Enter(), "blocks.*.mlp": Region()},
    {"blocks.*.mlp": Region(), "blocks.*.mlp.1": Row()},
    {"blocks.*.mlp": Enter(), "blocks.*.mlp.1": Row(leaves=False)},
]


def batch(vocab=VOCAB):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, vocab, (2, LENGTH)).astype(np.int32)
    labels = rng.integers(0, vocab, (2, LENGTH)).astype(np.int32)
    labels[0, :3] = -100
    return Tensor(ids), Tensor(labels.reshape(-1))


def gradients(model, loss_sum, *inputs, vocab=VOCAB, between=lambda: None):
    """Loss, and the gradient of each parameter by name; `between` is called between forward and backward."""
    ids, labels = batch(vocab)
    with _compat.tape():
        logits = model(ids, *inputs)
        loss = loss_sum(logits.reshape(-1, logits.shape[-1]), labels)
    between()
    _compat.backward(loss)
    found = {name: _compat.gradient(param).asnumpy() for name, param in model.parameters_and_names()}
    _compat.clear_grads(model.get_parameters())
    return float(loss.asnumpy()), found


def compare(comm, placements, found, expected):
    """Largest relative difference of local gradients, partial ones summed, to their part of the whole."""
    worst = 0.0
    floor = 1e-3 * max(float(np.abs(grad).max()) for grad in expected.values())  # a key bias has none
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        for axis in placements.replicas(name):
            if axis.is_partial:
                grad = comm.all_reduce(Tensor(grad), axis.group).asnumpy()
        want = placements.box(name, grad.shape).take(expected[name])
        assert grad.shape == want.shape, name
        scale = max(floor, float(np.abs(expected[name]).max()))
        worst = max(worst, float(np.abs(grad - want).max()) / scale)
    return worst


def foreign(comm):
    """[worst difference of loss and gradients] for both borders, and the shapes of the local weights."""
    positions = Tensor(np.arange(LENGTH, dtype=np.int32))
    loss, expected = gradients(Foreign(), kernels.CrossEntropySum(), positions)
    results = []
    for border in (WholeSequence(comm, comm.world), SplitSequence(comm, comm.world)):
        model = Foreign()
        names = [param.name for param in model.get_parameters()]
        placements = parallelize(model, FOREIGN_PLAN, border)
        assert [param.name for param in model.get_parameters()] == names
        loss_sum = VocabularyCrossEntropySum(comm, comm.world, VOCAB)
        ours, found = gradients(model, loss_sum, positions)
        results += [abs(ours - loss) / loss, compare(comm, placements, found, expected)]
    return [results, {name: list(grad.shape) for name, grad in found.items()}]


def losses(comm):
    """Differences of the cut loss and of its gradient, for vocabularies that do and do not divide."""
    results = []
    for size in (12, 13, 257):
        rng = np.random.default_rng(size)
        logits = (rng.standard_normal((9, size)) * 8).astype(np.float32)
        labels = rng.integers(0, size, 9).astype(np.int32)
        labels[[0, 4]] = -100
        loss_sum = VocabularyCrossEntropySum(comm, comm.world, size)
        for values in (labels, np.full(9, -100, np.int32)):
            part = logits[:, loss_sum.first : loss_sum.stop].copy()
            ours, theirs = [
                loss_and_gradient(function, array, values)
                for function, array in ((loss_sum, part), (kernels.CrossEntropySum(), logits))
            ]
            gap = np.abs(ours[1] - theirs[1][:, loss_sum.first : loss_sum.stop]).max()
            results.append([abs(ours[0] - theirs[0]) / max(1.0, theirs[0]), float(gap)])
    return results


def loss_and_gradient(function, logits, labels):
    leaf = Tensor(logits)
    leaf.requires_grad_(True)
    with _compat.tape():
        loss = function(leaf * 1.0, Tensor(labels))
    _compat.backward(loss, Tensor(np.float32(0.5)))
    return float(loss.asnumpy()), _compat.gradient(leaf).asnumpy()


def refusals(comm):
    """The messages of what is refused."""
    border, found = WholeSequence(comm, comm.world), []
    attempts = [
        lambda: parallelize(Foreign(), {"nothing.*": Row()}, border),
        lambda: parallelize(Foreign(), {"head": Row(), "h*d": Enter()}, border),
        lambda: parallelize(Foreign(), {"blocks.*.mlp": Row()}, border),
        lambda: parallelize(Foreign(), {"blocks.0": Vocabulary()}, border),
        lambda: parallelize(Foreign(), {"blocks.*.mlp.0": Column(blocks=7, enters=True)}, border),
        lambda: parallelize(tied(), {"head": Column(enters=True)}, border),
        lambda: VocabularyCrossEntropySum(comm, comm.world, 20)(*part_of(20, 99)),
        lambda: VocabularyCrossEntropySum(comm, comm.world, 20)(*part_of(5, 1)),
        lambda: outside(border),
        lambda: SplitSequence(comm, comm.world).span(2 * comm.world_size + 1),
        lambda: parallelize(Foreign(), {"blocks.*": Region(), "blocks.*.mlp.1": Row(leaves=False)}, border),
        lambda: parallelize(Foreign(), {"head": Cut((("nothing", 0),))}, border),
        lambda: parallelize(Foreign(), {"head": Cut((("weight", -3),))}, border),
        lambda: parallelize(Foreign(), {"head": Column(blocks=0, enters=True)}, border),
        lambda: parallelize(Foreign(), {"head": "row"}, border),
        *(lambda plan=plan: parallelize(Foreign(), plan, border) for plan in WRONG_REGIONS),
    ]
    for attempt in attempts:
        with pytest.raises(UserError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def outside(border):
    model = Foreign()
    parallelize(model, FOREIGN_PLAN, border)
    model(Tensor([[VOCAB]], ms.int32), Tensor([0], ms.int32))


def part_of(size, label):
    return Tensor(np.zeros((1, size // 4), np.float32)), Tensor([label], ms.int32)


def tied():
    model = Foreign()
    model.head.weight = model.embed.embedding_table
    return model


def our_models(comm, runs):
    """For each run: differences of loss and gradients, and the calls of forward and of backward by kind."""
    return [our_model(comm, *run) for run in runs]


def our_model(comm, base, overrides, split_sequence):
    config = load_config(base, [*overrides, "model.num_layers=2"], comm.world_size, to_run=False).config
    plain = build_model(config.model)
    initialise(plain, 7)
    loss, expected = gradients(plain, kernels.CrossEntropySum(), vocab=config.model.vocab_size)
    model = build_model(config.model)
    rules = init_rules(model)
    shapes = {name: param.shape for name, param in model.parameters_and_names()}
    pmesh = ProcessMesh(Mesh(tp=comm.world_size), comm)
    cut = cut_model(model, config.model, pmesh, split_sequence=split_sequence)
    values = cut.placements.local_values(
        lambda name, start, stop: initial_values(rules[name], name, shapes[name], 7, start, stop)
    )
    for name, param in model.parameters_and_names():
        param.data = Tensor(values(name, 0, param.size).reshape(param.shape))
    comm.counters.reset()
    forward = []

    def between():
        forward.append(calls_by_kind(comm))
        comm.counters.reset()

    ours, found = gradients(model, cut.loss_sum, vocab=config.model.vocab_size, between=between)
    calls = [*forward, calls_by_kind(comm)]
    numel = sum(grad.size for grad in found.values())
    return [abs(ours - loss) / loss, compare(comm, cut.placements, found, expected), calls, numel]


def calls_by_kind(comm):
    return [comm.counters.total_calls(op, "tp") for op in ("all_reduce", "reduce_scatter", "all_gather")]


LLAMA_GQA = ("runs/llama-tiny", ["model.qk_norm=true", "model.qkv_bias=true", "model.tie_embeddings=true"])
GPT = ("runs/quickstart", [])
MODELS = [(*GPT, False), (*GPT, True), (*LLAMA_GQA, False), (*LLAMA_GQA, True)]


def job(comm):
    return {
        "foreign": foreign(comm),
        "losses": losses(comm),
        "refusals": refusals(comm) if comm.world_size == 4 else None,
        "models": our_models(comm, MODELS),
    }


@pytest.fixture(scope="module")
def four():
    return run_workers(4, job, timeout_s=240)


@pytest.fixture(scope="module")
def two():
    return run_workers(2, job, timeout_s=240)


@pytest.mark.parametrize("workers", ["two", "four"])
def test_a_model_of_ones_own_computes_the_same(request, workers):
    reports = request.getfixturevalue(workers)
    for report in reports:
        differences, _ = report["foreign"]
        assert max(differences) < 2e-6
    shapes = [report["foreign"][1] for report in reports]
    assert sum(shape["head.weight"][0] for shape in shapes) == VOCAB
    assert sum(shape["blocks.0.mlp.1.weight"][1] for shape in shapes) == 7
    assert {tuple(shape["blocks.0.mlp.1.bias"]) for shape in shapes} == {(WIDTH,)}


def test_the_cut_loss_is_the_whole_one(two, four):
    for report in (*two, *four):
        assert np.max(report["losses"]) < 1e-6
        assert [loss for loss, _ in report["losses"][1::2]] == [0.0, 0.0, 0.0]  # no valid label


def test_our_models_compute_the_same(two, four):
    for report in (*two, *four):
        for loss, gradient, _, _ in report["models"]:
            assert loss < 1e-6 and gradient < 5e-6


def test_a_layer_costs_two_all_reduces_forward_and_two_backward(four):
    layers = 2
    for report in four:
        for _, _, calls, _ in report["models"][::2]:
            # Forward also one for the embedding and two for the loss, backward one where the head is left.
            assert calls == [[2 * layers + 3, 0, 0], [2 * layers + 1, 0, 0]]


def test_with_a_cut_sequence_scatter_and_gather_take_their_place(four):
    layers = 2
    for report in four:
        for _, _, calls, _ in report["models"][1::2]:
            # The embedding is only left, the head only entered; the loss has its two. Logits never travel.
            borders = 2 * layers + 1
            assert calls == [[2, borders, borders], [0, borders, borders]]


def test_key_value_heads_are_held_by_several_ranks(four):
    config = load_config("runs/llama-tiny", [*LLAMA_GQA[1], "model.num_layers=2"]).config.model
    assert config.num_kv_heads == 2
    whole = sum(param.size for param in build_model(config).get_parameters())
    held = sum(report["models"][2][3] for report in four)
    kv = 2 * 2 * (config.hidden_size + 1) * config.num_kv_heads * config.head_dim
    norms = config.hidden_size * 5 + 2 * 2 * config.head_dim
    assert held == whole + kv + 3 * norms  # two copies of the one, four of the other


def test_what_cannot_be_cut_is_refused(four):
    expected = [
        "pattern nothing.* of the plan matches no cell",
        "head matches head and h*d",
        "blocks.0.mlp (SequentialCell) is no linear layer",
        "blocks.0 is no embedding",
        "7 features in 7 blocks cannot be shared between 4 ranks",
        "cuts embed.embedding_table but not embed.embedding_table, which is the same parameter",
        "loss: labels: 99 is outside of the 20 entries",
        "logits have 1 entries on this rank, 5 of 20 are its part",
        "embedding: indices: 13 is outside of the 13 entries",
        "4 tensor-parallel ranks do not divide a sequence of 9 tokens",
        "blocks.0.mlp.1 gives a partial sum, to which a bias or an activation cannot be applied",
        "head has no parameter nothing with a dim 0",
        "head has no parameter weight with a dim -3",
        "head.weight: 0 blocks, expected at least 1",
        "pattern head of the plan has row, not a style",
        "head is in no region: gradients of its input are not summed",
        "blocks.0.mlp.0 is in the region that blocks.0.mlp enters: entering again would sum gradients twice",
        "blocks.0.mlp is in the region that blocks.0 enters: entering again",
        "blocks.0.mlp.1 is in the region that blocks.0.mlp enters: Region sums its result again",
        "blocks.0.mlp.1 is in the region that blocks.0.mlp enters: nothing adds up its partial sum",
    ]
    for messages in (report["refusals"] for report in four):
        for message, part in zip(messages, expected, strict=True):
            assert part in message and "\n" not in message, message


def test_one_rank_leaves_the_model_as_it_is():
    model = Foreign()
    cells = [id(cell) for _, cell in model.cells_and_names()]
    comm = local()
    placements = parallelize(model, FOREIGN_PLAN, WholeSequence(comm, comm.world))
    assert placements.by_name == {} and [id(cell) for _, cell in model.cells_and_names()] == cells

"""From what backward delivers to what the optimizer gets."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_zero.comm import ProcessMesh, local
from ms_zero.errors import UserError
from ms_zero.memory.recompute import recompute
from ms_zero.mesh import Mesh
from ms_zero.optim import SGD, AdamW
from ms_zero.precision.policy import Policy
from ms_zero.testing import run_workers
from ms_zero.zero import Options, shard, wrap_classes
from tests.zero.models import Awkward, batch
from tests.zero.models import loss_of as loss_of_awkward
from tests.zero.recorder import INPUT, WIDTH, Block, Followed, follow, forward, loss_of, step


def reductions(comm):
    return [event.removeprefix("reduce ") for event in comm.take() if event.startswith("reduce ")]


def orders(comm):
    """Sizes in the order of reduction, by stage; each rank leaves other parameters unused."""
    found = []
    for stage in range(4):
        for synchronise in (True, False):
            cell = Awkward()
            cell.use_bias = comm.rank == 1
            recorder = Recording(comm)
            options = Options(stage, synchronise=synchronise, bucket_bytes=160)
            model = shard(cell, ProcessMesh(Mesh(dp_shard=2), recorder), stage=stage, options=options)
            ids, labels = batch(0)
            for last in (False, True):
                with model.record():
                    loss = loss_of_awkward(model, ids, labels)
                model.backward(loss, last=last)
            model.reduce()
            found.append(recorder.sizes)
    return found


class Recording:
    """Passes everything on and writes down the sizes of what is reduced."""

    def __init__(self, comm):
        self._comm, self.sizes = comm, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def reduce_scatter_async(self, x, group, op="sum"):
        self.sizes.append(x.size)
        return self._comm.reduce_scatter_async(x, group, op)


def test_ranks_that_leave_different_parameters_unused_reduce_in_one_order():
    first, second = run_workers(2, orders)
    assert first == second and all(first)


def test_stage_3_reduces_unit_by_unit_during_backward():
    model, comm = follow()
    model.backward(forward(model))
    events = comm.take()
    for name in ("blocks.2", "blocks.1", "blocks.0"):
        assert events.index(f"reduce {name}") < events.index(f"backward {name}")
    assert events[-2:] == ["reduce the root", "backward the root"]


def test_without_synchronisation_only_the_last_microbatch_is_reduced():
    for stage in range(4):
        model, comm = follow(stage, synchronise=False)
        model.backward(forward(model), last=False)
        assert reductions(comm) == []
        model.backward(forward(model))
        assert len(reductions(comm)) == len(model.buckets)


class Outside(Followed):
    """Uses a block's matrix in the root as well, while the block's window is open for its own backward."""

    def construct(self, x):
        return super().construct(x) + ops.MatMul()(x, self.blocks[2].weight)


def test_a_late_gradient_is_refused_by_name():
    cell = Followed(calls=(0, 0))
    block = cell.blocks[0]
    cell.blocks[0] = recompute_around(block)
    model = shard(cell, ProcessMesh(Mesh(), local()), stage=3, wrap=wrap_classes(Block))
    with pytest.raises(UserError, match=r"blocks\.0\..* got a gradient after the backward of its unit had"):
        model.backward(forward(model))


class Around(nn.Cell):
    """A cell around a unit, so that the unit runs inside of the recomputed part."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def construct(self, x):
        return self.inside(x)


def recompute_around(cell):
    around = Around(cell)
    recompute(around)
    return around


def test_a_gradient_outside_of_a_microbatch_is_refused():
    model, _ = follow(0)
    for _ in range(2):
        with pytest.raises(UserError, match="got a gradient outside of a microbatch"):
            ms.value_and_grad(lambda: loss_of(model), None, model.model.trainable_params())()
        step(model)


def test_a_step_without_a_complete_gradient_is_refused():
    for stage in range(4):
        model, _ = follow(stage)
        optimizer = AdamW(model)
        with pytest.raises(UserError, match="the step has no gradient"):
            optimizer.step(lr=0.1)
        model.backward(forward(model), last=False)
        with pytest.raises(UserError, match="pass last=True"):
            optimizer.step(lr=0.1)
        model.backward(forward(model))
        assert optimizer.step(lr=0.1).finite
        with pytest.raises(UserError, match="the step has no gradient"):
            optimizer.step(lr=0.1)


def test_losses_that_cannot_be_followed_back_are_refused():
    model, _ = follow(1)
    frozen = Followed()
    frozen.requires_grad_ = None
    with model.record():
        rows = (model(INPUT) ** 2).mean(1)
        constant = (INPUT**2).mean()
    for loss, message in (
        (rows, r"of shape \[3\]: expected a 0-d"),
        (1.0, "the loss is float"),
        (constant, "does not depend on any trained parameter"),
        (loss_of(model), "outside of `with model.record"),
    ):
        with pytest.raises(UserError, match=message):
            model.backward(loss)
    step(model)


def test_freezing_after_sharding_is_refused():
    model, _ = follow(1)
    model.model.first.requires_grad = False
    model.backward(forward(model))
    with pytest.raises(UserError, match="requires_grad of parameter first was changed"):
        model.reduce()


def test_reducing_twice_sums_replicas_once():
    for found in run_workers(2, reduce_twice):
        once, twice = found
        assert once == twice


def reduce_twice(comm):
    found = []
    for times in (1, 2):
        model = shard(Followed(), ProcessMesh(Mesh(dp_replicate=2, dp_shard=1), comm), stage=1)
        model.backward(forward(model))
        for _ in range(times):
            model.reduce()
        found.append([bucket.reduced.asnumpy().tolist() for bucket in model.buckets])
        with_error = False
        try:
            model.backward(forward(model))
        except UserError:
            with_error = True
        assert with_error, "a further microbatch after the reduction"
    return found


def accumulate(policy, stage, synchronise):
    """The gradient of two microbatches, of which the second has a 2^-10 part of the first."""
    model = shard(
        Followed(),
        ProcessMesh(Mesh(), local()),
        stage=stage,
        policy=policy,
        options=Options(stage, synchronise=synchronise),
    )
    for weight, last in ((1.0, False), (2.0**-10, True)):
        model.backward(forward(model), weight=weight, last=last)
    model.reduce()
    return {bucket.reduced.dtype for bucket in model.buckets}, np.concatenate(
        [bucket.reduced.astype(ms.float32).asnumpy() for bucket in model.buckets]
    )


@pytest.mark.parametrize("synchronise", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_kept_in_the_dtype_of_the_policy(stage, synchronise):
    one = accumulate(Policy("bf16", "bf16"), stage, synchronise)
    assert one[0] == {ms.float32}
    low = accumulate(Policy("bf16", "bf16", accumulate="bf16"), stage, synchronise)
    assert low[0] == {ms.bfloat16}
    # In bf16 the second microbatch, 2^-10 of the first, is lost; in fp32 it is not.
    exact = one[1] / np.float32(1 + 2.0**-10)
    np.testing.assert_allclose(low[1], exact, rtol=2.0**-8)
    rounded = Tensor(exact).astype(ms.bfloat16).astype(ms.float32).asnumpy()
    assert (low[1] == rounded).mean() > 0.9 and (one[1] != exact).mean() > 0.9


def test_a_skipped_step_leaves_no_gradient_behind():
    for stage in range(4):
        model, _ = follow(stage)
        optimizer = SGD(model)
        before = model.state_dict()
        model.backward(forward(model, Tensor(np.full((3, WIDTH), np.inf, np.float32))))
        skipped = optimizer.step(lr=0.1)
        assert not skipped.finite and skipped.nonfinite == next(iter(before)) == "first"
        assert (optimizer.num_skipped, optimizer.num_updates) == (1, 0)
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(value, before[name])
        assert model.held_bytes()["gradients"] == 0
        model.backward(forward(model))
        fresh, _ = follow(stage)
        fresh.backward(forward(fresh))
        applied = optimizer.step(lr=0.1)
        assert applied.norm == SGD(fresh).step(lr=0.1).norm and applied.nonfinite is None

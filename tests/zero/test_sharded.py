"""Every stage trains an awkward model as plain training does, and all stages alike to the last bit."""

import itertools

import numpy as np
import pytest

from ms_zero.comm import ProcessMesh, local
from ms_zero.mesh import Mesh
from ms_zero.optim import SGD
from ms_zero.precision.policy import Policy
from ms_zero.testing import run_workers
from ms_zero.zero import Options, shard
from ms_zero.zero.units import wrap_blocks
from tests.zero.models import ROWS, Awkward, batch, loss_of, plain_training

STEPS, LR = 3, 0.1


def train(comm, options, *, mesh=None, accumulation=1, policy=None, leaves=False, steps=STEPS):
    """Losses (mean over ranks), gradients of the last step, and the final parameters."""
    cell = Awkward()
    mesh = ProcessMesh(mesh or Mesh(dp_shard=comm.world_size), comm)
    model = shard(
        cell,
        mesh,
        stage=options.stage,
        policy=policy or Policy(),
        options=options,
        wrap=wrap_blocks(cell, leaves=leaves),
    )
    optimizer = SGD(model)
    losses = []
    for step in range(steps):
        ids, labels = batch(step)
        mine = slice(comm.rank * ROWS // comm.world_size, (comm.rank + 1) * ROWS // comm.world_size)
        columns = np.split(ids[mine], accumulation), np.split(labels[mine], accumulation)
        parts = list(zip(*columns, strict=True))
        total = 0.0
        for number, (x, y) in enumerate(parts, 1):
            with model.record():
                loss = loss_of(model, x, y)
            model.backward(loss, weight=1 / accumulation, last=number == accumulation)
            total += float(loss.asnumpy()) / accumulation
        losses.append(sum(comm.exchange(total)) / comm.world_size)
        model.reduce()
        gradients = whole_gradients(model, comm)
        optimizer.apply(lr=LR)
    return losses, gradients, model.state_dict()


def whole_gradients(model, comm):
    gradients = {}
    for bucket in model.buckets:
        full = comm.all_gather(bucket.reduced, model.groups.shard).asnumpy()
        gradients |= {slot.name: slot.view(full).copy() for slot in bucket.layout.slots}
    return gradients


def distance(ours, theirs):
    return max(float(np.abs(np.asarray(ours[name]) - theirs[name]).max()) for name in theirs)


def compare_all(comm):
    """One job: every stage, both ways to synchronise, accumulation, units."""
    reference_losses, reference_gradients, reference_params = plain_training(STEPS, LR)
    problems, bits = [], {}
    cases = itertools.product((0, 1, 2, 3), (True, False), (1, 3), (True, False))
    for stage, synchronise, accumulation, leaves in cases:
        options = Options(stage, synchronise=synchronise, bucket_bytes=160, reshard_after_forward=leaves)
        if ROWS // comm.world_size % accumulation:
            continue
        losses, gradients, params = train(comm, options, accumulation=accumulation, leaves=leaves)
        case = f"stage {stage} synchronise {synchronise} accumulation {accumulation} leaves {leaves}"
        if not np.allclose(losses, reference_losses, rtol=1e-5):
            problems.append(f"{case}: losses {losses}, reference {reference_losses}")
        gap = distance(gradients, reference_gradients), distance(params, reference_params)
        if max(gap) > 5e-6:
            problems.append(f"{case}: gradients and parameters differ by {gap}")
        key = (synchronise and accumulation > 1, accumulation)
        blob = b"".join(np.ascontiguousarray(params[name]).tobytes() for name in sorted(params))
        if bits.setdefault(key, blob) != blob:
            problems.append(f"{case}: parameters differ from another stage's in some bit")
    return problems


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_stage_trains_like_plain_training(world_size):
    assert run_workers(world_size, compare_all, timeout_s=300) == [[]] * world_size


def compare_replicas(comm):
    """HSDP: 2 replicas of 2 shards, all stages above 0 alike, with and without synchronisation."""
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    _, gradients, params = plain_training(STEPS, LR)
    problems, bits = [], set()
    for stage, synchronise in itertools.product((0, 1, 2, 3), (True, False)):
        options = Options(stage, synchronise=synchronise, bucket_bytes=160)
        _, found, ours = train(comm, options, mesh=mesh)
        if max(distance(found, gradients), distance(ours, params)) > 5e-6:
            problems.append(f"stage {stage} synchronise {synchronise}: differs from the reference")
        if stage:
            bits.add(b"".join(np.ascontiguousarray(ours[name]).tobytes() for name in sorted(ours)))
    return [*problems, f"{len(bits)} different results"]


def test_replicas_of_shards_train_like_plain_training():
    assert run_workers(4, compare_replicas, timeout_s=300) == [["1 different results"]] * 4


def one_rank_uses_the_bias(comm):
    """Ranks that leave different parameters unused agree on the sum over those that use them."""
    results = []
    for stage in (0, 1, 2, 3):
        cell = Awkward()
        cell.use_bias = comm.rank == 0
        model = shard(cell, ProcessMesh(Mesh(dp_shard=2), comm), stage=stage)
        ids, labels = batch(0)
        with model.record():
            loss = loss_of(model, ids, labels)
        model.backward(loss)
        model.reduce()
        results.append(whole_gradients(model, comm)["blocks.0.bias"].tolist())
    return results


def test_a_parameter_that_only_one_rank_uses_gets_its_gradient():
    first, second = run_workers(2, one_rank_uses_the_bias)
    assert first == second
    assert all(grad == first[0] for grad in first) and np.abs(first[0]).max() > 0


def test_a_frozen_parameter_keeps_its_value_and_an_unused_one_too():
    before = {name: param.asnumpy().copy() for name, param in Awkward().parameters_and_names()}
    for stage in (0, 3):
        _, gradients, after = train(local(), Options(stage))
        assert "scale" not in gradients
        np.testing.assert_array_equal(after["scale"], before["scale"])
        np.testing.assert_array_equal(gradients["unused"], 0)
        np.testing.assert_array_equal(after["unused"], before["unused"])


def test_a_tied_parameter_is_stored_once():
    model = shard(Awkward(), ProcessMesh(Mesh(), local()), stage=3)
    slots = [slot.name for bucket in model.all_buckets for slot in bucket.layout.slots]
    assert sorted(slots) == sorted(set(slots)) == sorted(model.names)
    assert sum(name.endswith("table") for name in slots) == 1

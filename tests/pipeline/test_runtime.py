"""Schedules executed by workers on a chain of plain Cells, against one process."""

import os
import random
import signal
import time
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_zero import models
from ms_zero._compat import backward, clear_grads, gradient, launch_blocking, tape
from ms_zero.comm import Group, Handle
from ms_zero.errors import UserError
from ms_zero.models.init import initialise
from ms_zero.models.layers import name_parameters_by_path
from ms_zero.pipeline import schedule as schedules
from ms_zero.pipeline.runtime import Pipeline
from ms_zero.pipeline.schedule import Action, Message, Schedule
from ms_zero.testing.workers import WorkerError, run_workers

WIDTH = 8


class Layer(nn.Cell):
    """A residual layer; with ``size`` 0 it has no parameters."""

    def __init__(self, size):
        super().__init__()
        self.up = models.layers.Linear(WIDTH, size, bias=True, init_std=0.3) if size else None
        self.down = models.layers.Linear(size, WIDTH, bias=False, init_std=0.3) if size else None

    def construct(self, x):
        return x if self.up is None else x + self.down(ops.tanh(self.up(x)))


class Net(nn.Cell):
    """Layers and a loss: the mean square of what they leave."""

    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.CellList([Layer(size) for size in sizes])
        name_parameters_by_path(self)
        initialise(self, 5)


def batch(microbatch, length):
    rng = np.random.default_rng(microbatch)
    return Tensor(rng.standard_normal((2, length(microbatch), WIDTH)).astype(np.float32))


def same_length(microbatch):
    return 3


def growing(microbatch):
    return 2 + microbatch % 3


class Stages:
    """One layer a stage; an integer travels with the activations."""

    def __init__(self, net, length, trouble=None):
        self.net, self.length, self.trouble, self.ended = net, length, trouble, []
        self.late = {}  # gradients that were put off, by id of the parameter

    def key(self, microbatch):
        return self.length(microbatch)

    def forward(self, stage, microbatch, inputs):
        if self.trouble == (stage, microbatch):
            raise ArithmeticError("out of luck")
        if self.trouble == ("killed", stage, microbatch):
            os.kill(os.getpid(), signal.SIGKILL)
        x, count = inputs or (batch(microbatch, self.length), Tensor(np.zeros(1, np.int32)))
        x = self.net.layers[stage](x)
        if stage == len(self.net.layers) - 1:
            assert count.asnumpy().tolist() == [stage]
            return (ops.square(x).mean(),)
        return x, count + 1

    def loss_gradient(self, microbatch, loss):
        return Tensor(np.float32(1 / (1 + microbatch)))

    def around_backward(self, stage, microbatch, *, weights, last):
        self.ended.append((weights, last))
        return nullcontext()

    def weights(self, stage, microbatch, waiting, *, last):
        self.ended.append((True, last))
        for param, grad in waiting.take():
            known = self.late.get(id(param))
            self.late[id(param)] = grad if known is None else known + grad

    def gradient(self, param):
        late, now = self.late.get(id(param)), gradient(param)
        assert late is None or now is None  # a layer puts off all its gradients or none
        return now if late is None else late


def reference(sizes, num_microbatches, length):
    net, losses = Net(sizes), []
    for microbatch in range(num_microbatches):
        with tape():
            x = batch(microbatch, length)
            for layer in net.layers:
                x = layer(x)
            loss = ops.square(x).mean()
        losses.append(float(loss.asnumpy()))
        backward(loss, Tensor(np.float32(1 / (1 + microbatch))))
    grads = {name: gradient(param).asnumpy() for name, param in net.parameters_and_names()}
    return losses, grads


# (schedule, microbatches, virtual stages, lengths)
CASES = {
    2: [("gpipe", 4, 1), ("1f1b", 5, 1), ("1f1b", 1, 1), ("interleaved", 4, 2), ("zb-h1", 4, 1)],
    3: [("gpipe", 2, 1), ("1f1b", 2, 1), ("interleaved", 6, 3), ("zb-h1", 5, 1)],
    4: [("1f1b", 6, 1), ("1f1b", 3, 1), ("interleaved", 4, 2), ("zb-h1", 3, 1)],
}


def execute(comm, schedule, sizes, length, agree=np.array_equal):
    """Run a schedule twice on fresh gradients; compare with one process; return what was wrong."""
    net = Net(sizes)
    work, pipeline = Stages(net, length), Pipeline(comm, comm.world)
    losses, grads = reference(sizes, schedule.num_microbatches, length)
    for _ in range(2):
        clear_grads(net.get_parameters())
        work.late.clear()
        outcome = pipeline.run(schedule, work)
    evaluated = pipeline.evaluate(schedule.placement, schedule.num_microbatches, work)
    rank, wrong = comm.rank, []
    for stage in schedule.stages_of(rank):
        for name, param in net.layers[stage].parameters_and_names():
            if not agree(work.gradient(param).asnumpy(), grads[f"layers.{stage}.{name}"]):
                wrong.append(f"gradient of {stage}.{name}")
    elsewhere = [net.layers[s] for s in range(schedule.num_stages) if schedule.placement[s] != rank]
    wrong += [f"gradient on {rank}" for c in elsewhere for p in c.get_parameters() if work.gradient(p)]
    if schedule.placement[-1] == rank:
        for found in (outcome.losses, evaluated.losses):
            values = [float(found[m].asnumpy()) for m in range(schedule.num_microbatches)]
            wrong += [] if values == losses else [f"losses {values}, expected {losses}"]
    peaks = (outcome.peak_in_flight, outcome.peak_held)
    expected = tuple(schedules.peak_in_flight(schedule, until)[rank] for until in "BW")
    wrong += [] if peaks == expected else [f"in flight {peaks}, expected {expected}"]
    ends = [weights for weights, last in work.ended if last]
    wrong += [] if ends == [True, True] and work.ended[-1] == (True, True) else [f"ends {work.ended}"]
    # Only products have parameters here: whatever is put off waits for a W.
    put_off = bool(work.late) or not has_parameters(schedule, sizes, rank)
    wrong += [] if put_off or not schedule.splits_backward() else ["nothing was put off"]
    return wrong


def has_parameters(schedule, sizes, rank):
    return any(sizes[stage] for stage in schedule.stages_of(rank))


def any_order(seed, num_ranks, num_stages, num_microbatches):
    """A random valid list with split backwards: what can run, in any order, on any placement."""
    choose = random.Random(seed)
    placement = [choose.randrange(num_ranks) for _ in range(num_stages - num_ranks)]
    placement += choose.sample(range(num_ranks), num_ranks)
    left = {Action(*action) for action in product("FBW", range(num_stages), range(num_microbatches))}
    orders, done = [[] for _ in range(num_ranks)], set()
    while left:
        ready = sorted(action for action in left if set(schedules.dependencies(action, num_stages)) <= done)
        action = choose.choice(ready)
        left.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return Schedule(f"random {seed}", num_microbatches, tuple(placement), tuple(map(tuple, orders)))


def nearly(found, expected):
    return np.allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def run_all(comm, cases):
    launch_blocking()
    wrong = []
    for seed in range(3):
        schedule = any_order(seed, comm.world_size, comm.world_size + seed, 3)
        sizes = [0 if stage % 3 == 1 else 3 for stage in range(schedule.num_stages)]
        found = execute(comm, schedule, sizes, growing, agree=nearly)  # sums in another order
        wrong += [f"{schedule.name}: {w}" for w in found]
    for name, num_microbatches, num_virtual in cases:
        for length in (same_length, growing):
            schedule = schedules.build(name, comm.world_size, num_microbatches, num_virtual)
            sizes = [3 + stage % 3 for stage in range(schedule.num_stages)]
            sizes[1] = 0  # a stage without parameters
            wrong += [f"{name} {num_microbatches}: {w}" for w in execute(comm, schedule, sizes, length)]
    schedule = folded(comm.world_size)
    return wrong + [f"folded: {w}" for w in execute(comm, schedule, [3] * schedule.num_stages, growing)]


def folded(num_ranks):
    """Stages go down the ranks and up again: the middle two are neighbours on the last rank."""
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    orders = []
    for rank in range(num_ranks):
        mine = [stage for stage, owner in enumerate(placement) if owner == rank]
        forwards = [Action("F", stage, microbatch) for microbatch in range(2) for stage in mine]
        backwards = [Action("B", stage, microbatch) for microbatch in (1, 0) for stage in reversed(mine)]
        orders.append((*forwards, *backwards))
    return Schedule("folded", 2, placement, tuple(orders))


@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_and_losses_are_those_of_one_process(num_ranks):
    assert run_workers(num_ranks, run_all, CASES[num_ranks]) == [[]] * num_ranks


def raise_in_the_middle(comm):
    launch_blocking()
    schedule = schedules.build("1f1b", comm.world_size, 4)
    work = Stages(Net([3] * 3), same_length, trouble=(1, 2))
    Pipeline(comm, comm.world).run(schedule, work)


def test_an_exception_ends_all_workers_and_says_where():
    with pytest.raises(WorkerError) as caught:
        run_workers(3, raise_in_the_middle, timeout_s=50)
    message = str(caught.value)
    assert "rank 1" in message and "out of luck" in message
    assert "in the forward of stage 1, microbatch 2" in message


def kill_in_the_middle(comm):
    launch_blocking()
    schedule = schedules.build("1f1b", comm.world_size, 4)
    work = Stages(Net([3] * 4), same_length, trouble=("killed", 2, 1))
    Pipeline(comm, comm.world).run(schedule, work)


def test_a_killed_worker_ends_the_others_in_seconds():
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 2 failed:\nkilled by SIGKILL"):
        run_workers(4, kill_in_the_middle, timeout_s=100)
    assert time.monotonic() - start < 60  # instead of the time limit, or those of the collectives


def refusals(comm):
    """What ranks say of layouts that do not fit, and of shapes that change."""
    launch_blocking()
    pipeline, work = Pipeline(comm, comm.world), Stages(Net([3] * 2), same_length)
    said = []
    pipeline.run(schedules.build("1f1b", 2, 4), work)
    for schedule in (
        schedules.build("1f1b", 3, 4),
        schedules.build(("1f1b", "gpipe")[comm.rank], 2, 4),
        schedules.build("1f1b", 2, 4 + comm.rank),
        schedules.build("1f1b", 2, 3 + comm.rank),  # one of them has passed before
        Schedule("short", 1, (0, 1), ((Action("F", 0, 0),), (Action("F", 1, 0), Action("B", 1, 0)))),
    ):
        with pytest.raises(UserError) as caught:
            pipeline.run(schedule, work)
        said.append(str(caught.value))
    return said


def test_layouts_that_do_not_fit_are_refused_on_all_ranks():
    for rank, said in enumerate(run_workers(2, refusals)):
        other = 1 - rank
        names = ("1f1b", "gpipe")
        assert said[0] == "pipeline: schedule 1f1b is for 3 ranks, this pipeline has 2: build it for as many"
        assert f"rank {other} runs schedule {names[other]} with 4 microbatches" in said[1]
        assert f"rank {other} runs schedule 1f1b with {4 + other} microbatches and rank {rank}" in said[2]
        assert f"rank {other} runs schedule 1f1b with {3 + other} microbatches and rank {rank}" in said[3]
        assert "0B0 is missing" in said[4]


class Alone:
    """A communicator that swallows what is sent."""

    def send_async(self, tensor, target, group):
        return Handle(None)


def test_shapes_may_not_change_behind_a_key():
    group = Group("pipeline", (0, 1), 0)
    pipeline, message = Pipeline(Alone(), group), Message(0, 1, "F", 1, 0)
    assert len(pipeline.send((Tensor(np.zeros((2, 3), np.float32)),), message, "a")) == 2  # with a header
    assert len(pipeline.send((Tensor(np.zeros((2, 3), np.float32)),), message, "a")) == 1
    assert len(pipeline.send((Tensor(np.zeros((2, 4), np.float32)),), message, "b")) == 2
    with pytest.raises(UserError, match=r"Float32 \[2, 4\].*earlier one that gave Float32 \[2, 3\]"):
        pipeline.send((Tensor(np.zeros((2, 4), np.float32)),), message, "a")
    with pytest.raises(UserError, match=r"Float64 \[1\]: expected one of"):
        pipeline.send((Tensor(np.zeros(1)),), message, "c")
    with pytest.raises(UserError, match="fewer tensors"):
        pipeline.send((Tensor(np.zeros((1,) * 7, np.float32)),) * 8, message, "d")

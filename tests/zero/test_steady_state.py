"""A rank's memory: nothing is left over from steps, and the most that is resident falls with the stage."""

import ctypes
import gc

import numpy as np
from mindspore import Tensor

from ms_zero import memory
from ms_zero.comm import ProcessMesh
from ms_zero.mesh import Mesh
from ms_zero.models import GPT
from ms_zero.models.init import init_rules, initial_values
from ms_zero.monitor import host_rss_bytes
from ms_zero.optim import AdamW
from ms_zero.testing import run_workers
from ms_zero.testing.live import live_storages
from ms_zero.zero import HostStates, NvmeStates, Options, shard, wrap_blocks

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "ffn_hidden_size": 128}
LARGE = {"vocab_size": 96, "hidden_size": 256, "num_layers": 19, "num_heads": 2, "ffn_hidden_size": 1024}
#: stage, recompute, optimizer state, further options
CASES = (
    (0, "full", "cpu", {}),
    (1, "sqrt", "nvme", {}),
    (2, "selective", "cpu", {}),
    (2, "full", "nvme", {"synchronise": False}),
    (3, "none", "nvme", {}),
    (3, "full", "device", {}),
    (3, "sqrt", "device", {}),
    (3, "selective", "device", {"reshard_after_forward": False}),
    (3, "full", "cpu", {"params_on_host": True}),
)


class Job:
    """A sharded GPT and its optimizer."""

    def __init__(self, comm, shape, options, *, recompute="none", offload=None):
        cell = GPT(**shape, max_seq_len=16)
        if recompute != "none":
            memory.apply_recompute(cell, recompute)
        rules = init_rules(cell)
        shapes = {name: tuple(param.shape) for name, param in cell.parameters_and_names()}
        self.psi = sum(int(np.prod(each)) for each in shapes.values())
        self.model = shard(
            cell,
            ProcessMesh(Mesh(dp_shard=comm.world_size), comm),
            stage=options.stage,
            options=options,
            values=lambda name, a, b: initial_values(rules[name], name, shapes[name], 1, a, b),
            wrap=wrap_blocks(cell, leaves=True),
        )
        self.optimizer = AdamW(self.model, offload=offload)

    def step(self, microbatches=2):
        for number in range(1, microbatches + 1):
            with self.model.record():
                loss = self.model(Tensor(np.full((1, 16), number, np.int32))).mean()
            self.model.backward(loss, last=number == microbatches)
        self.optimizer.step(lr=0.1)


def count_tensors(comm, folder):
    """By case the tensors alive after 2, 3 and 7 steps."""
    counts = []
    for stage, recompute, place, more in CASES:
        offload = {"cpu": HostStates, "nvme": lambda: NvmeStates(folder), "device": lambda: None}[place]()
        before = len(live_storages())
        job = Job(comm, SMALL, Options(stage, **more), recompute=recompute, offload=offload)
        found = []
        for steps in (2, 1, 4):
            for _ in range(steps):
                job.step()
            found.append(len(live_storages()) - before)
        job.optimizer.close()
        counts.append(found)
        del job
        gc.collect()
    return counts


def test_no_tensor_outlives_its_step_with_recompute_and_offload(tmp_path):
    for counts in run_workers(2, count_tensors, str(tmp_path), timeout_s=240):
        for case, (early, later, last) in zip(CASES, counts, strict=True):
            assert early == later == last > 0, (case, counts)


def most_resident(comm, options):
    """Bytes per parameter that resident memory was above its start at most, in or between units."""
    Job(comm, SMALL, Options(**options)).step()  # loads libraries, fills caches
    gc.collect()
    start = resident()
    job, seen = Job(comm, LARGE, Options(**options)), []
    for unit in job.model.units:
        for cell in unit.cells:
            cell.register_forward_hook(lambda *_: seen.append(resident()))
            cell.register_backward_hook(lambda *_: seen.append(resident()))
    job.step()
    return (max(seen) - start) / job.psi


def resident():
    """Resident bytes without what is free in the heap."""
    ctypes.CDLL(None).malloc_trim(0)
    return host_rss_bytes()


def test_the_most_that_is_resident_is_what_a_stage_holds():
    """Two microbatches in fp32 on two ranks: 16 bytes a parameter are held in stage 0, and 8 in stage 3."""
    cut = {"bucket_bytes": 4 * 2**20}
    cases = {
        "stage 0": {"stage": 0},
        "stage 3": {"stage": 3},
        "whole weights": {"stage": 3, "reshard_after_forward": False},
        "whole gradients": {"stage": 3, "synchronise": False},
    }
    peaks = {
        name: min(run_workers(2, most_resident, {**cut, **case}, timeout_s=240))
        for name, case in cases.items()
    }
    # On top comes the same for all: windows, buckets under way, activations, the framework's pool.
    assert peaks["stage 0"] - peaks["stage 3"] > 0.85 * (16 - 8), peaks
    # Were weights or gradients of all units to linger, it would be as much as when they are meant to stay.
    assert peaks["whole weights"] - peaks["stage 3"] > 1.5, peaks
    assert peaks["whole gradients"] - peaks["stage 3"] > 1.5, peaks

"""Stage 0 on several workers: sums, bits, padding, traffic. One job per world size."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ms_zero.testing.workers import run_workers


def single():
    """The model and helpers of the one-process tests."""
    path = Path(__file__).with_name("test_data_parallel.py")
    spec = importlib.util.spec_from_file_location("data_parallel_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(comm):
    model = single()
    local_batches = model.batches(2 * comm.world_size)[comm.rank :: comm.world_size]
    everything = model.batches(2 * comm.world_size).reshape(-1, 4).astype(np.float64)
    first_bits = None
    for bucket_elements in (1, 14, 1000):
        net, parallel = model.build(bucket_elements, comm)
        values = {name: param.asnumpy() for name, param in net.parameters_and_names()}
        comm.counters.reset()
        chunks = model.accumulate(net, parallel, local_batches)
        for bucket, chunk in zip(parallel.buckets, chunks, strict=True):
            start, stop = parallel.owned(bucket)
            assert chunk.shape == (stop - start,)
        gathered = parallel.gather(chunks)
        padded = sum(bucket.layout.padded_size for bucket in parallel.buckets)
        sent = sum(comm.counters.bytes.values())
        assert sent == 2 * (comm.world_size - 1) * padded * 4 // comm.world_size
        found = model.by_name(parallel, gathered)
        for name, gradient in model.numpy_gradients(everything, values).items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)
        bits = b"".join(found[name].tobytes() for name in sorted(found))
        assert first_bits in (None, bits), "the sum depends on the bucket"
        first_bits = bits
        everywhere = comm.exchange(bits.hex())
        assert len(set(everywhere)) == 1, "ranks disagree"
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_hold_the_same_sum_with_ring_traffic_and_bits_independent_of_buckets(world_size):
    assert run_workers(world_size, check) == [True] * world_size

"""Save under one layout, read under another: bitwise equal, whatever the layouts."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest

from ms_zero.checkpoint import Shard, latest, open_checkpoint
from ms_zero.checkpoint.tensorfile import DTYPES
from ms_zero.errors import UserError


def random_tensor(rng, dtype):
    shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.05 else 1, 7, rng.integers(0, 4)))
    storage = DTYPES[dtype][1]
    bits = rng.integers(0, 2 if dtype == "bool" else 256, prod(shape) * storage.itemsize, np.uint8)
    return bits.view(storage).reshape(shape)


def random_boxes(rng, offset, shape):
    """Cut a box in two along a random dim, a few times over."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    if not dims or rng.random() < 0.3:
        return [(offset, shape)]
    dim = int(rng.choice(dims))
    cut = int(rng.integers(1, shape[dim]))
    found = []
    for low, high in ((0, cut), (cut, shape[dim])):
        part_offset = tuple(at + low if d == dim else at for d, at in enumerate(offset))
        part_shape = tuple(high - low if d == dim else n for d, n in enumerate(shape))
        found += random_boxes(rng, part_offset, part_shape)
    return found


def random_layout(rng, name, array, dtype):
    """Shards that tile the tensor: random boxes, each cut into random flat ranges."""
    shards = []
    for offset, shape in random_boxes(rng, (0,) * array.ndim, array.shape):
        size = prod(shape)
        cuts = sorted({0, size, *(int(n) for n in rng.integers(0, size + 1, rng.integers(0, 4)))})
        ranges = list(pairwise(cuts)) or [(0, 0)]
        shards += [Shard(name, array.shape, dtype, offset, shape, a, b) for a, b in ranges]
    return shards


def values_of(shard, array):
    box = array[(..., *(slice(at, at + n) for at, n in zip(shard.offset, shard.shape)))]
    return box.reshape(-1)[shard.flat_start : shard.flat_stop].reshape(shard.array_shape)


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_reads_what_any_other_wrote(tmp_path, world, seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    tensors = {}
    for i in range(6):
        dtype = str(rng.choice(list(DTYPES)))
        tensors[f"model.layers.{i}.weight"] = (dtype, random_tensor(rng, dtype))
    by_rank = [[] for _ in range(size)]
    for name, (dtype, array) in tensors.items():
        for shard in random_layout(rng, name, array, dtype):
            by_rank[int(rng.integers(size))].append((shard, values_of(shard, array)))
    state = {"seed": seed, "nested": {"list": [1, [2.5, None]], "big": 2**70, "tiny": 5e-324, "third": 1 / 3}}

    paths = world(size).save(tmp_path, 10, by_rank, state)

    assert paths == [tmp_path / "step-00000010"] * size
    assert latest(tmp_path) == paths[0]
    checkpoint = open_checkpoint(paths[0])
    assert checkpoint.state == state and checkpoint.step == 10
    assert set(checkpoint.names()) == set(tensors)
    for name, (dtype, array) in tensors.items():
        assert checkpoint.whole(name) == Shard.whole(name, array.shape, dtype)
        for _ in range(3):
            for shard in random_layout(rng, name, array, dtype):
                back, expected = checkpoint.read(shard), values_of(shard, array)
                assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
                assert back.tobytes() == expected.tobytes()


def test_a_single_rank_writes_one_plain_safetensors_file(tmp_path, world):
    """Tensor names are the keys, so that other tools can use the file directly."""
    import safetensors.numpy

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (path,) = world(1).save(tmp_path, 0, [[(Shard.whole("lm_head.weight", (2, 3), "float32"), array)]], {})
    (file,) = path.glob("*.safetensors")
    assert np.array_equal(safetensors.numpy.load_file(file)["lm_head.weight"], array)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", file.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000000"]


def test_several_shards_of_one_name_on_a_rank_and_awkward_names(tmp_path, world):
    w = np.arange(4, dtype=np.int64)
    halves = [(Shard.flat("w", (4,), "int64", a, a + 2), w[a : a + 2]) for a in (0, 2)]
    seven = np.array(7)
    others = [(Shard.whole(name, (), "int64"), seven) for name in ("w#1", "__metadata__", "é/ü")]
    (path,) = world(1).save(tmp_path, 1, [halves + others], {})
    checkpoint = open_checkpoint(path)
    assert np.array_equal(checkpoint.read(Shard.whole("w", (4,), "int64")), w)
    for shard, array in others:
        assert checkpoint.read(shard) == array


def test_ranks_without_shards_write_no_file(tmp_path, world):
    shards = [[], [(Shard.whole("w", (2,), "float32"), np.ones(2, np.float32))], []]
    paths = world(3).save(tmp_path, 5, shards, {})
    assert [p.name[:10] for p in paths[0].glob("*.safetensors")] == ["rank-00001"]
    assert np.array_equal(open_checkpoint(paths[0]).read(shards[1][0][0]), np.ones(2))


@pytest.fixture
def checkpoint(tmp_path, world):
    shards = [
        (Shard.whole("model.wte.weight", (8, 4), "bfloat16"), np.arange(32, dtype=np.uint16).reshape(8, 4)),
        (Shard.whole("model.ln.weight", (4,), "float32"), np.ones(4, np.float32)),
    ]
    (path,) = world(1).save(tmp_path, 3, [shards], {"consumed_samples": 96})
    return open_checkpoint(path)


def test_nothing_is_converted_or_reshaped_silently(checkpoint):
    with pytest.raises(UserError, match=r"stored as bfloat16\[8, 4\], this run needs float32\[8, 4\]"):
        checkpoint.read(Shard.whole("model.wte.weight", (8, 4), "float32"))
    with pytest.raises(UserError, match=r"stored as bfloat16\[8, 4\], this run needs bfloat16\[9, 4\]"):
        checkpoint.read(Shard.whole("model.wte.weight", (9, 4), "bfloat16"))


def test_an_unknown_tensor_is_answered_with_the_nearest(checkpoint):
    with pytest.raises(UserError, match=r"wpe\.weight is not in .*; the nearest is model\.wte\.weight"):
        checkpoint.read(Shard.whole("model.wpe.weight", (8, 4), "bfloat16"))


def test_names_that_do_not_fit_the_run_are_listed(checkpoint):
    checkpoint.check_names(["model.wte.weight", "model.ln.weight"])
    with pytest.raises(UserError) as caught:
        checkpoint.check_names(["model.wte.weight", "a", "b", "c", "d"])
    assert str(caught.value) == (
        f"{checkpoint.path}: does not fit this run: 4 tensors are missing: a, b, c, ...; "
        f"1 tensors are stored but not in this run: model.ln.weight"
    )

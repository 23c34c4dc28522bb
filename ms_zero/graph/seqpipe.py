"""Sequences that go through a pipeline in parts: MindSpore's order "seqpipe".

Each microbatch is cut along its sequences, and its parts follow each other through the stages, which wait
less that way and hold fewer activations. Attention of a part looks at the tokens of the parts before it, too:
every attention keeps their keys and values in a cache

    keys of all parts so far  =  keys of this part, at their place  +  cache

and backward, which takes the parts in reverse, needs the gradients that later parts have for the keys of
earlier ones. MindSpore's compiler adds those: it knows the caches by the operators around them, by the names
``key_cache`` and ``value_cache`` and those of their gradients, and the number of the part by the name
``seq_chunk`` (2.10.0).
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from ms_zero._compat import declared_parameter
from ms_zero.graph.strategies import Attention, Grid, ShardedGPT, ShardedLlama

# What the compiler wants behind the name of a cache, for that of its gradient.
CACHE_GRADIENT = "_grad"


class PartCounter(nn.Cell):
    """Which part of the sequences comes now: counted by the compiled step itself, on every stage.

    Args:
        num_parts: of a sequence.
        shape: of keys, over all ranks of a stage: [B, T, heads, D].
        grid: the devices.
        dtype: of the computation.
    """

    def __init__(self, num_parts: int, shape: tuple[int, ...], grid: Grid, dtype: ms.Type) -> None:
        super().__init__(auto_prefix=False)
        self.dtype, self.one, self.zero = dtype, Tensor(1, ms.int32), Tensor(0, ms.int32)
        self.number = Parameter(
            Tensor(0, ms.int32), name="seq_chunk", requires_grad=False, parallel_optimizer=False
        )
        part_of = np.repeat(np.arange(num_parts, dtype=np.int32), shape[1] // num_parts)
        self.part_of = Tensor(np.ascontiguousarray(np.broadcast_to(part_of[:, None, None], (1, *shape[1:]))))
        self.zeros = Tensor(np.zeros(shape, np.int32))
        full = (grid.dp, 1, grid.tp, 1)
        self.spread = ops.Add().shard((full, (1, 1, grid.tp, 1)))
        self.equal, self.cast = ops.Equal().shard((full, ())), ops.Cast()
        self.copy, self.count, self.assign = ops.ReLU(), ops.AssignAdd(), ops.Assign()

    def construct(self) -> tuple[Tensor, Tensor]:
        """Return the number of the part, int32 0-d, and 1 at its place [B, T, heads, D], and count."""
        part = self.copy(self.number)
        here = self.cast(self.equal(self.spread(self.zeros, self.part_of), part), self.dtype)
        return part, ops.depend(here, self.count(self.number, ops.depend(self.one, here)))

    def reset(self) -> Tensor:
        """Begin with the first part again."""
        return self.assign(self.number, self.zero)


class CachedAttention(nn.Cell):
    """Attention of queries of a part [B, T / parts, H, D] on the keys and values of the parts so far.

    Args:
        attention: causal, of some queries on all keys.
        name: of its parameters.
        num_parts: of a sequence.
        shape: of the keys of whole sequences, over all ranks of a stage: [B, T, heads, D].
        grid: the devices.
        dtype: of the computation.
    """

    def __init__(
        self,
        attention: nn.Cell,
        name: str,
        num_parts: int,
        shape: tuple[int, ...],
        grid: Grid,
        dtype: ms.Type,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.attention, self.repeats = attention, (1, num_parts, 1, 1)
        held = (shape[0] // grid.dp, shape[1], shape[2] // grid.tp, shape[3])
        self.key_cache = _cache(f"{name}.key_cache", shape, dtype)
        self.value_cache = _cache(f"{name}.value_cache", shape, dtype)
        # The compiler cuts the caches, and takes these as they are.
        self.key_cache_grad = _cache(f"{name}.key_cache{CACHE_GRADIENT}", held, dtype)
        self.value_cache_grad = _cache(f"{name}.value_cache{CACHE_GRADIENT}", held, dtype)
        cut = (grid.dp, 1, grid.tp, 1)
        self.tile, self.at_place = ops.Tile().shard((cut,)), ops.Mul().shard((cut, cut))
        self.add_keys, self.add_values = ops.Add().shard((cut, cut)), ops.Add().shard((cut, cut))
        self.scale, self.differs = ops.Mul().shard((cut, ())), ops.NotEqual().shard((cut, ()))
        self.fill, self.is_not_last = ops.Mul().shard((cut, ())), ops.NotEqual()
        self.select, self.keep = ops.Select().shard((cut, cut, cut)), ops.Assign().shard((cut, cut))
        self.last = Tensor(num_parts - 1, ms.int32)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, part: Tensor, here: Tensor) -> Tensor:
        """Return [B, T / parts, H, D]; part, here: see `PartCounter`."""
        keys = self.add_keys(self.at_place(self.tile(k, self.repeats), here), self.key_cache)
        values = self.add_values(self.at_place(self.tile(v, self.repeats), here), self.value_cache)
        nothing = self.scale(here, 0)
        goes_on = self.fill(self.differs(nothing, -1), self.is_not_last(part, self.last))
        kept_keys = ops.stop_gradient(self.select(goes_on, keys, nothing))
        kept_values = ops.stop_gradient(self.select(goes_on, values, nothing))
        q = ops.depend(q, self.keep(self.key_cache, kept_keys))
        q = ops.depend(q, self.keep(self.value_cache, kept_values))
        return self.attention(q, keys, values)


def _cache(name: str, shape: tuple[int, ...], dtype: ms.Type) -> Parameter:
    cache = Parameter(initializer("zeros", shape, dtype), name=name, requires_grad=False)
    cache = declared_parameter(cache)
    cache.parallel_optimizer = False
    return cache


def caches(network: nn.Cell) -> list[Parameter]:
    """What a network keeps from part to part: not of the model, and zero before the first step."""
    found = (cell for _, cell in network.cells_and_names() if isinstance(cell, CachedAttention))
    return [param for cell in found for param in cell.parameters_dict(recurse=False).values()]


class PartAttention(nn.Cell):
    """The attention of a twin, on a part: the same parameters, and a cache."""

    def __init__(self, whole: Attention, cached: CachedAttention, project: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.whole, self.cached, self.project = whole, cached, project

    def construct(
        self, x: Tensor, shape: tuple[int, int], where: tuple[Tensor, ...], _: None, hidden: None = None
    ) -> Tensor:
        """Map x [B T, H] to [B T, H]; where: part and place, then cos and sin or nothing."""
        cos, sin = (where[2], where[3]) if len(where) > 2 else (None, None)
        q, k, v = self.whole.projected(x, shape, cos, sin)
        return self.project(self.whole.joined(self.cached(q, k, v, where[0], where[1]), shape))


class PartGPT(nn.Cell):
    """A ShardedGPT that gets its sequences in parts: int32 ids [B, T / parts] -> fp32 logits."""

    def __init__(self, whole: ShardedGPT, counter: PartCounter, positions: np.ndarray, grid: Grid) -> None:
        super().__init__(auto_prefix=False)
        self.whole, self.counter = whole, counter
        rows = grid.parts(grid.rows)
        self.positions, self.shift = Tensor(positions), ops.Add().shard(((rows,), ()))

    def construct(self, input_ids: Tensor, positions: None = None, starts: None = None) -> Tensor:
        """Return the logits [B T / parts, V]."""
        shape, body = input_ids.shape, self.whole.transformer
        part, here = self.counter()
        rows, table = body.wte(body.reshape(input_ids, (-1,)))
        x = body.add(rows, body.wpe.at(self.shift(self.positions, part * shape[1])))
        for block in body.h:
            x = block(x, shape, (part, here), None)
        return self.whole.lm_head(body.ln_f(x), table)


class PartLlama(nn.Cell):
    """A ShardedLlama that gets its sequences in parts: int32 ids [B, T / parts] -> fp32 logits."""

    def __init__(self, whole: ShardedLlama, counter: PartCounter, positions: np.ndarray, tokens: int) -> None:
        super().__init__(auto_prefix=False)
        self.whole, self.counter, self.tokens = whole, counter, tokens
        self.positions, self.shift = Tensor(positions), ops.Add().shard(((1,), ()))
        self.gather = ops.Gather().shard(((1, 1), (1,)))

    def construct(self, input_ids: Tensor, positions: None = None, starts: None = None) -> Tensor:
        """Return the logits [B T / parts, V]."""
        shape, body = input_ids.shape, self.whole.model
        part, here = self.counter()
        places = self.shift(self.positions, part * shape[1])
        cos = self.gather(body.table(self.tokens, True), places, 0)
        sin = self.gather(body.table(self.tokens, False), places, 0)
        cos = body.reshape(cos.astype(body.dtype), (1, shape[1], 1, -1))
        sin = body.reshape(sin.astype(body.dtype), (1, shape[1], 1, -1))
        x, table = body.embed_tokens(body.reshape(input_ids, (-1,)))
        for layer in body.layers:
            x = layer(x, shape, (part, here, cos, sin), None)
        return self.whole.lm_head(body.norm(x), table)


class SequenceParts(nn.Cell):
    """The summed loss of a microbatch: that of its parts, one after the other.

    Args:
        network: of a part; maps tensors [B, T / parts] to a summed loss.
        counter: of its parts.
        num_parts: of a sequence.
    """

    def __init__(self, network: nn.Cell, counter: PartCounter, num_parts: int) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.counter, self.num_parts = network, counter, num_parts
        self.add = ops.Add().add_prim_attr("seq_split_add", True)
        # By these the compiler knows the parts of a microbatch.
        self.cut = ops.StridedSlice().add_prim_attr("strided_slice_flag", True)
        self.cut.add_prim_attr("seq_split_slice", True).add_prim_attr("split_num", num_parts)

    def construct(self, *batch: Tensor) -> Tensor:
        """Return the sum."""
        ready = self.counter.reset()
        total = 0.0
        for number in range(self.num_parts):
            parts = ()
            for column in batch:
                rows, length = column.shape[0], column.shape[1] // self.num_parts
                begin, end = (0, number * length), (rows, (number + 1) * length)
                parts = (*parts, self.cut(ops.depend(column, ready), begin, end, (1, 1)))
            total = self.add(total, self.network(*parts))
        return total


def in_parts(
    twin: ShardedGPT | ShardedLlama,
    *,
    num_parts: int,
    samples: int,
    tokens: int,
    grid: Grid,
    dtype: ms.Type,
) -> PartGPT | PartLlama:
    """Make a twin, with its stages placed, work on parts of sequences.

    Args:
        twin: a model with strategies; it is changed.
        num_parts: of a sequence; divides ``tokens``.
        samples: of a microbatch, over all ranks of a stage.
        tokens: of a sequence.
        grid: the devices.
        dtype: of the computation.
    """
    names = [(param, param.name) for param in twin.get_parameters()]
    for number, block in enumerate(twin.blocks):
        whole = getattr(block, block.attention_name)
        shape = (samples, tokens, *whole.kv_shape)
        cached = CachedAttention(whole.attention, f"parts.{number}", num_parts, shape, grid, dtype)
        names += [(param, param.name) for param in cached.get_parameters()]
        project = whole.c_proj if isinstance(twin, ShardedGPT) else whole.o_proj
        setattr(block, block.attention_name, PartAttention(whole, cached, project))
    counter = PartCounter(num_parts, shape, grid, dtype)
    positions = np.arange(tokens // num_parts, dtype=np.int32)
    if isinstance(twin, ShardedGPT):
        model = PartGPT(twin, counter, np.tile(positions, samples), grid)
    else:
        model = PartLlama(twin, counter, positions, tokens)
    for param, name in names:  # their new places in Cells have given them new names
        param.name = name
    return model

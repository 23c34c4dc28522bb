"""A mixture of experts as operators with shard strategies, of the parameters of `ms_zero.models.moe`.

Graphs have static shapes, so each expert has C slots for each sequence::

    tokens [B, T, H] --gather--> slots [B, E, C, H] --> products [E, B C, .] --> slots --gather--> tokens

C is the capacity of `ms_zero.models.routing`, and the length of the sequence where every token is taken: the
same numbers as there, at the price of empty slots. An empty slot holds zeros. The batch of slots is cut over
all data-parallel ranks, the experts over ``ep`` of them: fitting one to the other is an all-to-all, which
MindSpore inserts, forward and backward.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.parallel import Layout

from ms_zero.errors import UserError
from ms_zero.graph.latent import WholeLinear
from ms_zero.graph.strategies import EnterRegion, GatedMLP, Grid
from ms_zero.models.moe import Experts, MoE, Router
from ms_zero.models.routing import Rules, capacity

_SMALLEST_SUM = 1e-20
_NEVER = -1e9  # preference of an expert that cannot be chosen


class ShardedRouter(nn.Cell):
    """Of the parameters of a Router: which slots tokens fill, and with what weight results come back.

    With a bias that follows the load, ``loads`` counts the tokens that chose each expert, int32 [E]: the host
    reads it after a step and clears it.
    """

    def __init__(self, plain: Router, grid: Grid) -> None:
        super().__init__()
        self.weight, self.bias, self.parameter_rules = plain.weight, plain.bias, plain.parameter_rules
        self.num_experts, rules = plain.weight.shape[0], plain.rules
        cut = (grid.dp, 1)
        self.matmul = ops.MatMul(transpose_b=True).shard((cut, (1, 1)))
        self.score = Scores(rules, grid)
        self.choose = Choice(self.num_experts, rules, grid)
        self.slots = Slots(self.num_experts, rules, grid)
        self.auxiliary = Auxiliary(self.num_experts, rules, grid) if rules.has_loss else None
        self.loads = None
        if self.bias is not None:
            self.loads = Parameter(Tensor(np.zeros(self.num_experts, np.int32)), requires_grad=False)
            self.count = ops.AssignAdd()
            self.total = ops.ReduceSum().shard(((grid.dp, 1, 1),))
        self.cast, self.reshape = ops.Cast(), ops.Reshape()

    def construct(
        self, x: Tensor, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Route x [B T, H] of `shape` (B, T).

        Returns:
            Token of each slot, int32 [B, E C]; 1 or 0 for a filled or empty one, fp32 [B, E C]; slot of each
            choice, int32 [B, T k]; its weight, fp32 [B, T, k]; the auxiliary loss [B], None without one.
        """
        logits = self.matmul(self.cast(x, ms.float32), self.weight)
        logits = self.reshape(logits, (*shape, self.num_experts))
        scores = self.score(logits)
        chosen, visits = self.choose(ops.stop_gradient(scores), self.bias)
        if self.loads is not None:
            self.count(self.loads, self.cast(self.total(visits, (0, 1)), ms.int32))
        sources, filled, places, kept = self.slots(chosen, visits)
        weights = self.score.weigh(scores, chosen)
        if kept is not None:
            weights = self.score.multiply_choices(weights, kept)
        aux = None
        if self.auxiliary is not None:
            aux = self.auxiliary(logits, scores, visits)
        return sources, filled, places, weights, aux


class Scores(nn.Cell):
    """Scores of experts [B, T, E], and the weights of chosen ones."""

    def __init__(self, rules: Rules, grid: Grid) -> None:
        super().__init__()
        cut, wide = (grid.dp, 1, 1), (grid.dp, 1, 1, 1)
        is_sigmoid = rules.score == "sigmoid"
        self.score = ops.Sigmoid().shard((cut,)) if is_sigmoid else ops.Softmax(-1).shard((cut,))
        self.renormalise, self.scaling = rules.renormalise, rules.scaling
        self.expand = ops.ExpandDims().shard((cut,))
        self.multiply = ops.Mul().shard((wide, wide))
        self.pick = ops.ReduceSum().shard((wide,))
        self.sum = ops.ReduceSum(keep_dims=True).shard((cut,))
        self.add, self.divide = ops.Add().shard((cut, ())), ops.RealDiv().shard((cut, cut))
        self.scale = ops.Mul().shard((cut, ()))
        self.multiply_choices = ops.Mul().shard((cut, cut))

    def construct(self, logits: Tensor) -> Tensor:
        """Map fp32 [B, T, E] to the scores."""
        return self.score(logits)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Weights [B, T, k] of what ``chosen`` [B, T, k, E] marks."""
        picked = self.pick(self.multiply(chosen, self.expand(scores, 2)), 3)
        if self.renormalise:
            picked = self.divide(picked, self.add(self.sum(picked, 2), _SMALLEST_SUM))
        return picked if self.scaling == 1.0 else self.scale(picked, self.scaling)


class Choice(nn.Cell):
    """The experts of each token, by scores and bias; of equals the lowest number."""

    def __init__(self, num_experts: int, rules: Rules, grid: Grid) -> None:
        super().__init__()
        cut, wide = (grid.dp, 1, 1), (grid.dp, 1, 1, 1)
        self.top_k, self.groups, self.top_groups = rules.top_k, rules.groups, rules.top_groups
        self.best_of_group = 2 if rules.score == "sigmoid" else 1
        self.best_of_group = min(self.best_of_group, num_experts // rules.groups)
        self.num_experts = num_experts
        self.add_bias = ops.Add().shard((cut, (1,)))
        self.top, self.top_of_group = ops.TopK().shard((cut,)), ops.TopK().shard((wide,))
        self.mark_experts, self.mark_groups = Marks(num_experts, grid), Marks(rules.groups, grid)
        self.sum_wide, self.sum_choices = ops.ReduceSum().shard((wide,)), ops.ReduceSum().shard((wide,))
        self.keep, self.lower = ops.Mul().shard((wide, wide)), ops.Mul().shard((wide, ()))
        self.minus, self.add = ops.Sub().shard((wide, ())), ops.Add().shard((wide, wide))
        self.expand, self.reshape = ops.ExpandDims().shard((cut,)), ops.Reshape()

    def construct(self, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map scores [B, T, E] to marks of the choices, fp32 [B, T, k, E], and their sum over k."""
        preference = scores if bias is None else self.add_bias(scores, bias)
        if self.groups > 1:
            preference = self.within_groups(preference)
        _, ids = self.top(preference, self.top_k)
        chosen = self.mark_experts(ids)
        return chosen, self.sum_choices(chosen, 2)

    def within_groups(self, preference: Tensor) -> Tensor:
        """The same, very low for experts outside of the best groups."""
        batch, length, _ = preference.shape
        grouped = self.reshape(preference, (batch, length, self.groups, -1))
        best, _ = self.top_of_group(grouped, self.best_of_group)
        _, ids = self.top(self.sum_wide(best, 3), self.top_groups)
        allowed = self.expand(self.sum_choices(self.mark_groups(ids), 2), 3)
        barred = self.lower(self.minus(allowed, 1.0), -_NEVER)
        return self.reshape(self.add(self.keep(grouped, allowed), barred), (batch, length, self.num_experts))


class Marks(nn.Cell):
    """Indices [B, T, k] below n -> fp32 [B, T, k, n], 1 at each index."""

    def __init__(self, size: int, grid: Grid) -> None:
        super().__init__()
        self.numbers = Tensor(np.arange(size, dtype=np.int32).reshape(1, 1, 1, size))
        self.expand = ops.ExpandDims().shard(((grid.dp, 1, 1),))
        self.equal = ops.Equal().shard(((grid.dp, 1, 1, 1), (1, 1, 1, 1)))
        self.cast = ops.Cast()

    def construct(self, indices: Tensor) -> Tensor:
        """Mark them."""
        return self.cast(self.equal(self.expand(indices, 3), self.numbers), ms.float32)


class Slots(nn.Cell):
    """Gives the choices of a sequence their slots: those of an expert in the order of the tokens."""

    def __init__(self, num_experts: int, rules: Rules, grid: Grid) -> None:
        super().__init__()
        cut, wide, flat = (grid.dp, 1, 1), (grid.dp, 1, 1, 1), (grid.dp, 1)
        self.num_experts = num_experts
        self.count = ops.CumSum().shard((cut,))
        self.within, self.keep = ops.LessEqual().shard((cut, ())), ops.Mul().shard((cut, cut))
        self.turn = ops.Transpose().shard((cut,))
        self.order, self.top = ops.Mul().shard((cut, (1, 1, 1))), ops.TopK().shard((cut,))
        self.least, self.most = ops.Minimum().shard((flat, ())), ops.Maximum().shard((flat, ()))
        self.backward_from = ops.Sub().shard(((), flat))
        self.offset = ops.Add().shard((cut, (1, 1, 1)))
        self.expand, self.multiply = ops.ExpandDims().shard((cut,)), ops.Mul().shard((wide, wide))
        self.pick = ops.ReduceSum().shard((wide,))
        self.reshape, self.cast = ops.Reshape(), ops.Cast()
        self.slots_of = ms.constexpr(lambda length: slots_of(num_experts, length, rules))
        self.countdown = ms.constexpr(lambda length: _row(np.arange(length, 0, -1)))
        self.starts = ms.constexpr(lambda slots: _row(np.arange(num_experts) * slots - 1))

    def construct(self, chosen: Tensor, visits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Map marks [B, T, k, E] and [B, T, E]; see `ShardedRouter`. The last result: which are kept."""
        batch, length, _ = visits.shape
        slots, kept = self.slots_of(length), None
        numbers = self.count(visits, 1)  # of each visit among those of its expert, from 1
        if slots < length:
            visits = self.keep(visits, self.cast(self.within(numbers, float(slots)), ms.float32))
            kept = self.pick(self.multiply(chosen, self.expand(visits, 2)), 3)
        # The visits of an expert, earliest first: T - t of each, and then zeros.
        late = self.order(self.turn(visits, (0, 2, 1)), self.countdown(length))
        late, _ = self.top(late, slots)
        late = self.reshape(late, (batch, self.num_experts * slots))
        filled = self.least(late, 1.0)
        sources = self.cast(self.backward_from(float(length), self.most(late, 1.0)), ms.int32)
        places = self.offset(numbers, self.starts(slots))
        places = self.pick(self.multiply(chosen, self.expand(places, 2)), 3)
        if kept is not None:
            places = self.keep(places, kept)  # dropped: any slot, of weight 0
        places = self.cast(self.reshape(places, (batch, -1)), ms.int32)
        return sources, filled, places, kept


def slots_of(num_experts: int, length: int, rules: Rules) -> int:
    """Slots of an expert for a sequence."""
    limit = capacity(num_experts, length, rules)
    slots = length if limit is None else min(limit, length)
    if num_experts * slots > 2**24:
        raise UserError(
            f"graph: {num_experts} experts with {slots} slots each: fp32 can count 2^24 slots of a sequence: "
            f"shorten data.seq_len or set model.capacity_factor"
        )
    return slots


def _row(values: np.ndarray) -> Tensor:
    return Tensor(values.astype(np.float32).reshape(1, 1, -1))


class Auxiliary(nn.Cell):
    """Balance loss and z-loss of each sequence, see `ms_zero.models.routing`."""

    def __init__(self, num_experts: int, rules: Rules, grid: Grid) -> None:
        super().__init__()
        cut, flat, one = (grid.dp, 1, 1), (grid.dp, 1), (grid.dp,)
        self.balance, self.z = rules.balance_coefficient, rules.z_coefficient
        self.shares = rules.score == "sigmoid"  # whose scores do not add up to 1
        self.frequency = num_experts / rules.top_k
        self.sum_last = ops.ReduceSum(keep_dims=True).shard((cut,))
        self.divide = ops.RealDiv().shard((cut, cut))
        self.sum_tokens, self.sum_experts = ops.ReduceSum().shard((cut,)), ops.ReduceSum().shard((flat,))
        self.multiply, self.scale = ops.Mul().shard((flat, flat)), ops.Mul().shard((one, ()))
        self.max = ops.ReduceMax(keep_dims=True).shard((cut,))
        self.subtract, self.exp, self.log = ops.Sub().shard((cut, cut)), ops.Exp(), ops.Log()
        self.exp.shard((cut,))
        self.log.shard((cut,))
        self.add, self.square = ops.Add().shard((cut, cut)), ops.Square().shard((cut,))
        self.sum_sequence, self.join = ops.ReduceSum().shard((cut,)), ops.Add().shard((one, one))

    def construct(self, logits: Tensor, scores: Tensor, visits: Tensor) -> Tensor:
        """Map three fp32 [B, T, E] to [B]."""
        length = logits.shape[1]
        aux = None
        if self.balance > 0:
            shares = self.divide(scores, self.sum_last(scores, 2)) if self.shares else scores
            each = self.multiply(self.sum_tokens(visits, 1), self.sum_tokens(shares, 1))
            factor = self.balance * self.frequency / (length * length)
            aux = self.scale(self.sum_experts(each, 1), factor)
        if self.z > 0:
            highest = ops.stop_gradient(self.max(logits, 2))
            log_sum = self.add(highest, self.log(self.sum_last(self.exp(self.subtract(logits, highest)), 2)))
            z = self.scale(self.sum_sequence(self.square(log_sum), (1, 2)), self.z / length)
            aux = z if aux is None else self.join(aux, z)
        return aux


class ShardedExperts(nn.Cell):
    """Of the stacked parameters of Experts: slots [B, E C, H] -> the same, each through its expert."""

    def __init__(self, plain: Experts, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = plain.gate_proj, plain.up_proj, plain.down_proj
        self.parameter_rules, self.dtype = plain.parameter_rules, dtype
        self.num_experts, size, self.hidden_size = plain.gate_proj.shape[0], *plain.gate_proj.shape[1:]
        if size % grid.tp:
            raise UserError(f"graph: tp {grid.tp} does not divide the {size} rows of {plain.gate_proj.name}")
        if self.num_experts % grid.ep or grid.dp % grid.ep:
            raise UserError(
                f"graph: ep {grid.ep} does not divide {self.num_experts} experts and dp {grid.dp}: choose a "
                f"degree that does"
            )
        layout = Layout((grid.dp // grid.ep, grid.ep, grid.tp), ("edp", "ep", "tp"))
        samples = layout(("edp", "ep"), "None", "None", "None")
        self.from_samples, self.to_samples = (ops.Identity().shard((samples,)) for _ in range(2))
        self.to_experts = ops.Transpose().shard((layout("edp", "ep", "None", "None"),))
        self.from_experts = ops.Transpose().shard((layout("ep", "edp", "None", "None"),))
        rows, inner = layout("ep", "edp", "None"), layout("ep", "edp", "tp")
        columns, narrow = layout("ep", "tp", "None"), layout("ep", "None", "tp")
        self.first = ops.BatchMatMul(transpose_b=True).shard((rows, columns))
        self.last = ops.BatchMatMul(transpose_b=True).shard((inner, narrow))
        self.sigmoid, self.multiply = ops.Sigmoid().shard((inner,)), ops.Mul().shard((inner, inner))
        self.reshape, self.cast = ops.Reshape(), ops.Cast()

    def construct(self, slots: Tensor) -> Tensor:
        """Apply the experts."""
        batch, number, _ = slots.shape
        slots = self.reshape(slots, (batch, self.num_experts, -1, self.hidden_size))
        slots = self.to_experts(self.from_samples(slots), (1, 0, 2, 3))
        rows = self.reshape(slots, (self.num_experts, -1, self.hidden_size))
        gate = self.first(rows, self.cast(self.gate_proj, self.dtype))
        up = self.first(rows, self.cast(self.up_proj, self.dtype))
        inner = self.multiply(self.multiply(gate, self.sigmoid(gate)), up)
        rows = self.last(inner, self.cast(self.down_proj, self.dtype))
        rows = self.reshape(rows, (self.num_experts, batch, -1, self.hidden_size))
        slots = self.to_samples(self.from_experts(rows, (1, 0, 2, 3)))
        return self.reshape(slots, (batch, number, self.hidden_size))


class ShardedMoE(nn.Cell):
    """Of the parameters of a MoE: [B T, H] -> [B T, H] and the auxiliary loss [B], None without one."""

    def __init__(self, plain: MoE, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.enter, self.dtype = EnterRegion(grid), dtype
        self.router = ShardedRouter(plain.router, grid)
        self.experts = ShardedExperts(plain.experts, grid, dtype)
        self.shared = None if plain.shared is None else GatedMLP(plain.shared, grid, dtype)
        self.shared_gate = None
        rows = grid.layout(grid.rows, "None")
        if plain.shared_gate is not None:
            self.shared_gate = WholeLinear(plain.shared_gate, grid, dtype)
            self.sigmoid, self.gated = ops.Sigmoid().shard((rows,)), ops.Mul().shard((rows, rows))
        cut, wide = (grid.dp, 1, 1), (grid.dp, 1, 1, 1)
        self.fill = ops.Gather(batch_dims=1).shard((cut, (grid.dp, 1)))
        self.collect = ops.Gather(batch_dims=1).shard((cut, (grid.dp, 1)))
        self.expand, self.mask = ops.ExpandDims().shard(((grid.dp, 1),)), ops.Mul().shard((cut, cut))
        self.expand_weights, self.weigh = ops.ExpandDims().shard((cut,)), ops.Mul().shard((wide, wide))
        self.sum = ops.ReduceSum().shard((wide,))
        self.leave, self.join = ops.Identity().shard((rows,)), ops.Add().shard((rows, rows))
        self.reshape, self.cast = ops.Reshape(), ops.Cast()

    def construct(self, x: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Apply it to x of `shape` (B, T)."""
        tokens, size = self.enter(x), x.shape[-1]
        sources, filled, places, weights, aux = self.router(tokens, shape)
        slots = self.fill(self.reshape(tokens, (*shape, size)), sources, 1)
        slots = self.mask(slots, self.expand(self.cast(filled, self.dtype), 2))
        parts = self.collect(self.experts(slots), places, 1)
        parts = self.cast(self.reshape(parts, (*shape, -1, size)), ms.float32)
        y = self.sum(self.weigh(parts, self.expand_weights(weights, 3)), 2)
        y = self.leave(self.reshape(self.cast(y, self.dtype), (-1, size)))
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = self.gated(self.sigmoid(self.shared_gate(x)), shared)
            y = self.join(y, shared)
        return y, aux

"""Decoders with experts in compiled graphs: the twin of `ms_zero.models.decoder`, its loss and its engine.

The plain model decides on the host which experts a token visits; its twin does so inside the graph, with the
same parameters under the same names. On CPU it runs as it is, under AutoParallel its operators are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero import kernels
from ms_zero.comm import Communicator, Group
from ms_zero.config import ModelConfig
from ms_zero.data import IGNORED_LABEL, NO_RESETS, DocumentResets
from ms_zero.graph.engine import GraphEngine
from ms_zero.graph.experts import ShardedMoE, ShardedRouter
from ms_zero.graph.latent import ShardedLatentAttention
from ms_zero.graph.network import LossNetwork
from ms_zero.graph.step import GraphStep, graph_mode
from ms_zero.graph.strategies import (
    Block,
    GatedMLP,
    Grid,
    Head,
    HeadNorm,
    RowNorm,
    ShardedLlamaAttention,
    TokenRows,
    sharded_model,
)
from ms_zero.models import MoEDecoder
from ms_zero.models.decoder import MoELayer
from ms_zero.models.latent import LatentAttention
from ms_zero.models.layers import name_parameters_by_path
from ms_zero.models.moe import MoE
from ms_zero.models.routing import updated_bias


class ShardedMoELayer(Block):
    """Of the parameters of a MoELayer."""

    attention_name = "self_attn"

    def __init__(
        self, plain: MoELayer, heads: tuple[int, int], eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__(grid)
        self.input_layernorm = RowNorm(plain.input_layernorm, eps, grid, dtype)
        if isinstance(plain.self_attn, LatentAttention):
            self.self_attn = ShardedLatentAttention(plain.self_attn, heads[0], eps, grid, dtype)
        else:
            self.self_attn = ShardedLlamaAttention(plain.self_attn, *heads, eps, grid, dtype)
        self.post_attention_layernorm = RowNorm(plain.post_attention_layernorm, eps, grid, dtype)
        self.has_experts = isinstance(plain.mlp, MoE)
        self.mlp = (ShardedMoE if self.has_experts else GatedMLP)(plain.mlp, grid, dtype)
        self.add_aux = ops.Add().shard(((grid.dp,), (grid.dp,)))

    def construct(
        self, x: Tensor, aux: Tensor | None, shape: tuple[int, int], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Map x [B T, H] and the auxiliary loss [B] of earlier layers (None: of none) to the same."""
        x = self.join(x, self.self_attn(self.input_layernorm(x), shape, cos, sin))
        hidden = self.post_attention_layernorm(x)
        if not self.has_experts:
            return self.join(x, self.mlp(hidden)), aux
        y, own = self.mlp(hidden, shape)
        if aux is not None and own is not None:
            own = self.add_aux(aux, own)
        return self.join(x, y), own


class ShardedMoEModel(nn.Cell):
    """Of the parameters of a MoEModel."""

    def __init__(
        self, plain: nn.Cell, heads: tuple[int, int], eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__()
        self.embed_tokens = TokenRows(plain.embed_tokens, grid, dtype)
        self.rotary_emb, self.reshape, self.dtype = plain.rotary_emb, ops.Reshape(), dtype
        self.layers = nn.CellList(
            [ShardedMoELayer(layer, heads, eps, grid, dtype) for layer in plain.layers]
        )
        self.norm = RowNorm(plain.norm, eps, grid, dtype)

    def construct(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Map int32 ids [B, T] to [B T, H], the auxiliary loss [B], and the table of tokens."""
        shape = input_ids.shape
        cos, sin = self.rotary_emb(input_ids)
        cos = self.reshape(cos.astype(self.dtype), (1, shape[1], 1, -1))
        sin = self.reshape(sin.astype(self.dtype), (1, shape[1], 1, -1))
        x, table = self.embed_tokens(self.reshape(input_ids, (-1,)))
        aux = None
        for layer in self.layers:
            x, aux = layer(x, aux, shape, cos, sin)
        return self.norm(x), aux, table


class ShardedMoEDecoder(nn.Cell):
    """A MoEDecoder of the parameters of a plain one: int32 ids [B, T] -> fp32 logits [B T, V] and what the
    routers add to the loss of each sequence, fp32 [B], or None."""

    def __init__(
        self, plain: MoEDecoder, heads: tuple[int, int], eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__()
        self.model = ShardedMoEModel(plain.model, heads, eps, grid, dtype)
        tied = plain.lm_head.weight is plain.model.embed_tokens.weight
        self.lm_head = Head(plain.lm_head, grid, dtype, tied=tied)
        self.bias_speed = plain.bias_speed
        name_parameters_by_path(self)

    @property
    def blocks(self) -> nn.CellList:
        """The layers, in order."""
        return self.model.layers

    @property
    def first_cells(self) -> tuple[nn.Cell, ...]:
        """What comes before the layers."""
        return (self.model.embed_tokens,)

    @property
    def last_cells(self) -> tuple[nn.Cell, ...]:
        """What comes after the layers."""
        return self.model.norm, self.lm_head

    def construct(
        self, input_ids: Tensor, positions: None = None, starts: None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and auxiliary loss."""
        x, aux, table = self.model(input_ids)
        return self.lm_head(x, table), aux


class AuxiliarySum(nn.Cell):
    """The auxiliary loss of a sequence for each of its valid tokens: fp32 [B], int32 labels [B, T] -> 0-d."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        cut, one = (grid.dp, 1), (grid.dp,)
        self.not_equal, self.cast = ops.NotEqual().shard((cut, ())), ops.Cast()
        self.count, self.multiply = ops.ReduceSum().shard((cut,)), ops.Mul().shard((one, one))
        self.total = ops.ReduceSum().shard((one,))

    def construct(self, aux: Tensor, labels: Tensor) -> Tensor:
        """Return the sum."""
        valid = self.count(self.cast(self.not_equal(labels, IGNORED_LABEL), ms.float32), 1)
        return self.total(self.multiply(aux, valid))


def twin_of(plain: nn.Cell, config: ModelConfig, grid: Grid, dtype: ms.Type) -> nn.Cell:
    """The twin of a plain model of any family; see `ms_zero.graph.strategies.sharded_model`."""
    if isinstance(plain, MoEDecoder):
        heads = (config.num_heads, config.num_kv_heads)
        return ShardedMoEDecoder(plain, heads, config.norm_eps, grid, dtype)
    return sharded_model(plain, config, grid, dtype)


def auxiliary_sum(config: ModelConfig, grid: Grid) -> AuxiliarySum | None:
    """What adds up the auxiliary losses of a twin; None where there are none."""
    return AuxiliarySum(grid) if config.family == "moe" else None


def compiled_decoder(plain: MoEDecoder, config: ModelConfig, dtype: ms.Type, *, target: str) -> nn.Cell:
    """The twin of a model on one device; ``target``: "CPU", which lacks an operator, or "Ascend"."""
    twin = twin_of(plain, config, Grid(), dtype)
    if target == "CPU":
        for _, cell in twin.cells_and_names():
            if isinstance(cell, RowNorm | HeadNorm):
                cell.norm = _ComposedNorm(config.norm_eps)
    return twin


class _ComposedNorm(nn.Cell):
    """Stands for RmsNorm where there is no such operator."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = kernels.RMSNorm(eps)

    def construct(self, x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (self.norm(x, weight),)


class LoadBalancer:
    """Moves the biases of a twin's routers after each applied step; see `ms_zero.recipes.expert.Balancer`."""

    def __init__(self, twin: nn.Cell, comm: Communicator, group: Group, *, speed: float) -> None:
        """Join the parts.

        Args:
            twin: with routers that have a bias.
            comm: the communicator.
            group: the ranks that share a global batch.
            speed: what a bias moves by in a step.
        """
        cells = (cell for _, cell in twin.cells_and_names())
        self._routers = [cell for cell in cells if isinstance(cell, ShardedRouter) and cell.loads is not None]
        self._comm, self._group, self._speed = comm, group, speed

    def apply(self) -> None:
        """Move each bias by the load since the last step. Collective over the group."""
        own = self.take()
        if not own:
            return
        total, start = self._comm.all_reduce(Tensor(np.concatenate(own)), self._group).asnumpy(), 0
        for router, load in zip(self._routers, own, strict=True):
            moved = updated_bias(router.bias.asnumpy(), total[start : start + load.size], self._speed)
            router.bias.set_data(Tensor(moved))
            start += load.size

    def take(self) -> list[np.ndarray]:
        """Tokens that chose each expert since the last call, for each router; counting starts anew."""
        loads = [router.loads.asnumpy() for router in self._routers]
        for router, load in zip(self._routers, loads, strict=True):
            router.loads.set_data(Tensor(np.zeros_like(load)))
        return loads


class MoEGraphEngine(GraphEngine):
    """The engine of a decoder with experts, on whole models."""

    def __init__(
        self,
        model: nn.Cell,
        twin: nn.Cell,
        step: GraphStep,
        balancer: LoadBalancer,
        *,
        group: Group,
        resets: DocumentResets = NO_RESETS,
        notes: Sequence[str] = (),
    ) -> None:
        """Join the parts; see `GraphEngine`. ``twin``: of ``model``, what the step trains."""
        super().__init__(model, step, group=group, resets=resets, notes=notes)
        self._balancer = balancer
        self._evaluated = LossNetwork(twin)

    def update(self, *, lr: float, grad_scale: float) -> None:
        """Apply the reduced gradient, and move the biases of the routers."""
        super().update(lr=lr, grad_scale=grad_scale)
        self._balancer.apply()

    def discard(self) -> None:
        """Drop the reduced gradient of a skipped step, and its loads."""
        super().discard()
        self._balancer.take()

    def loss_sum(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None = None
    ) -> float:
        """Summed token loss of one batch without gradients, in nats; without auxiliary losses."""
        with graph_mode():
            loss = self._evaluated(*self._batch(input_ids, labels, document_starts))
        self._balancer.take()  # evaluation does not count
        return float(loss.asnumpy())

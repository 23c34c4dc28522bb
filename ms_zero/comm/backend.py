"""What a backend provides, and the backend of groups with one member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from mindspore import Tensor, ops

from ms_zero._compat import no_grad
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


class Backend(Protocol):
    """Collectives over validated arguments; ranks are world ranks. See `Communicator` for semantics."""

    def world_handle(self) -> str:
        """Framework name of the group of all ranks."""

    def create_group(self, ranks: Sequence[int]) -> str:
        """Create a group (called by its members only) and return its framework name."""

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """Reduce over the members."""

    def all_gather(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """Concatenate along dim 0."""

    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """Reduce over the members; each keeps its block of dim 0."""

    def all_to_all(
        self, x: Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Handle[Tensor]:
        """Exchange row blocks of dim 0."""

    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """Everybody gets the tensor of `src_rank`."""

    def send(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """Send to one member."""

    def recv(self, shape: tuple[int, ...], dtype: object, src_rank: int, group: Group) -> Handle[Tensor]:
        """Receive from one member."""

    def barrier(self, group: Group) -> None:
        """Return when all members have called."""


@no_grad()
def copy_tensor(x: Tensor) -> Tensor:
    """A new contiguous tensor with the values of `x`, outside any recorded graph.

    Multiplication, because ``copy_`` refuses a source that is a leading part of a larger tensor, and
    ``Tensor.copy`` is 30 times slower.
    """
    return x * 1


def dense(x: Tensor) -> Tensor:
    """`x` if it is contiguous and fills its storage, else a copy (kernels may read all storage of a view)."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return copy_tensor(x)


@no_grad()
def divide(total: Tensor, count: int) -> Tensor:
    """`total` / `count` in the dtype of `total`, outside any recorded graph."""
    return ops.cast(total / count, total.dtype)


class SingleBackend:
    """Groups of one member: every collective is a copy (works on any device, before any initialisation)."""

    def world_handle(self) -> str:
        """No framework group exists."""
        return ""

    def create_group(self, ranks: Sequence[int]) -> str:
        """Nothing to create."""
        return ""

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """A copy: one contribution is its own sum, average, maximum, minimum and product."""
        return Handle(copy_tensor(x))

    def all_gather(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """A copy."""
        return Handle(copy_tensor(x))

    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """A copy."""
        return Handle(copy_tensor(x))

    def all_to_all(
        self, x: Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Handle[Tensor]:
        """A copy."""
        return Handle(copy_tensor(x))

    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """A copy."""
        return Handle(copy_tensor(x))

    def send(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """Cannot happen: the communicator refuses messages to oneself."""
        raise AssertionError("a group of one has nobody to send to")

    def recv(self, shape: tuple[int, ...], dtype: object, src_rank: int, group: Group) -> Handle[Tensor]:
        """Cannot happen: the communicator refuses messages from oneself."""
        raise AssertionError("a group of one has nobody to receive from")

    def barrier(self, group: Group) -> None:
        """Nobody to wait for."""

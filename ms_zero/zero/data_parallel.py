"""Stage 0: replicated parameters, gradients summed over the data-parallel group in buckets.

One step has three phases:

1. Each microbatch: backward delivers gradients to their buckets through parameter hooks. All microbatches but
   the last only accumulate locally.
2. The last microbatch: a bucket whose gradients are complete is reduce-scattered at once, while backward
   goes on. Buckets are issued in one fixed order whatever order gradients appear in, because every rank must
   issue the same collectives in the same order. At the end of backward, what is missing counts as zero.
3. ``reduce()`` waits: each rank holds its chunk of the sum. ``gather()`` gives every rank the whole gradient.

Reduce-scatter sums in rank order at the owner, so the sum of an element does not depend on which bucket it
lies in, and stages that keep gradients sharded get bit-equal values. Volume per step: 2 (N-1)/N elements
sent per parameter, as a ring all-reduce.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from mindspore import Parameter, Tensor, mint

from ms_zero._compat import clear_grads
from ms_zero.comm import Communicator, Group, Handle
from ms_zero.zero.bucket import Bucket, ValueSource
from ms_zero.zero.layout import ParamSpec, plan_buckets


class DataParallel:
    """Buckets of one model's trainable parameters, and their gradient reduction."""

    def __init__(
        self,
        params: Mapping[str, Parameter],
        values: ValueSource,
        *,
        comm: Communicator,
        group: Group,
        bucket_elements: int,
        key_of: Callable[[str], Hashable] = lambda name: None,
    ) -> None:
        """Move parameters into buckets and register gradient hooks.

        Args:
            params: logical name -> trainable Parameter (fp32), in definition order, each storage once.
            values: initial values, the same on every rank.
            comm: the communicator.
            group: ranks that hold a replica and see different data.
            bucket_elements: upper size of a bucket; a larger single parameter gets its own.
            key_of: buckets never mix parameters with different keys.
        """
        specs = [ParamSpec(name, tuple(param.shape), key_of(name)) for name, param in params.items()]
        layouts = plan_buckets(specs, max_elements=bucket_elements, degree=group.size)
        self.buckets = [Bucket(layout, params, values) for layout in layouts]
        self._comm, self._group = comm, group
        self._params = list(params.values())
        self._reducing = False
        self._finished: set[int] = set()  # buckets whose gradient of the current microbatch is accumulated
        self._issued: list[Handle] = []  # reductions under way, in bucket order
        self._dropped = mint.zeros((1,))
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.layout.slots:
                params[slot.name].register_hook(self._hook(index, slot.name))

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Wrap the backward of one microbatch; ``last`` starts the reduction of complete buckets."""
        self._reducing = last
        self._finished.clear()
        yield
        for index in range(len(self.buckets)):
            if index not in self._finished:
                self._finish(index)
        clear_grads(self._params)

    def reduce(self) -> list[Tensor]:
        """Wait for the reductions of the step; this rank's chunk of the summed gradient, per bucket."""
        assert len(self._issued) == len(self.buckets), "reduce() follows the microbatch marked as last"
        chunks = [handle.wait() for handle in self._issued]
        self._issued.clear()
        for bucket in self.buckets:
            bucket.grad = None
        return chunks

    def gather(self, chunks: list[Tensor]) -> list[Tensor]:
        """The whole tensor of every bucket, put together from the ranks' chunks."""
        return [self._comm.all_gather(chunk, self._group) for chunk in chunks]

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """The range of the bucket's buffer whose chunk this rank holds."""
        return bucket.layout.chunk(self._group.index)

    def _hook(self, index: int, name: str) -> Callable[[Tensor], Tensor]:
        def receive(grad: Tensor) -> Tensor:
            if self.buckets[index].deliver(name, grad):
                self._finish(index)
            # The framework keeps what the hook returns: one element instead of a second full gradient.
            return self._dropped

        return receive

    def _finish(self, index: int) -> None:
        self.buckets[index].accumulate()
        self._finished.add(index)
        while self._reducing and len(self._issued) in self._finished:
            grad = self.buckets[len(self._issued)].grad
            self._issued.append(self._comm.reduce_scatter_async(grad, self._group))

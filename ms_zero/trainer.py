"""The trainer: one optimizer step, evaluation, and the state that a resumed run needs.

A step is: agree on the number of valid tokens -> microbatches (forward, backward, bucketed reduction in the
last) -> one decision on loss, norm and finiteness shared by all ranks -> update or skip, everywhere alike.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from mindspore import Tensor

from ms_zero.comm import Communicator, Group
from ms_zero.data import IGNORED_LABEL, Batch, BatchSchedule, SampleSequence
from ms_zero.graph.engine import GraphEngine
from ms_zero.optim.clip import decide
from ms_zero.optim.schedule import Schedule
from ms_zero.recipes.eager import EagerEngine


@dataclass
class Progress:
    """How far a run is. ``step`` counts attempts, ``updates`` those that were applied.

    A skipped step consumes its samples and does not advance the learning-rate schedule.
    """

    step: int = 0
    updates: int = 0
    skipped: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one step did, equal on all ranks.

    Attributes:
        step: number of this step, from 1.
        loss: mean over the valid tokens of the global batch, in nats.
        grad_norm: global norm before clipping.
        lr: learning rate of the update.
        num_samples: samples of the global batch.
        num_tokens: valid (predicted) tokens of the global batch.
        nonfinite: name of the first parameter with a gradient that is not finite, in a skipped step.
        stop: some rank asked to stop.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_samples: int
    num_tokens: int
    nonfinite: str | None
    stop: bool


class Trainer:
    """Drives an engine over a loader."""

    def __init__(
        self,
        engine: EagerEngine | GraphEngine,
        loader: SampleSequence,
        schedule: Schedule,
        *,
        comm: Communicator,
        group: Group,
        batch_size: BatchSchedule,
        micro_batch_size: int,
        clip_norm: float,
    ) -> None:
        """Join the parts.

        Args:
            engine: runs microbatches and updates.
            loader: training samples.
            schedule: learning rate of an update.
            comm: the communicator.
            group: the data-parallel ranks.
            batch_size: samples of each step over all ranks, in whole microbatches.
            micro_batch_size: samples of a microbatch on one rank.
            clip_norm: largest gradient norm; 0 turns clipping off.
        """
        self.engine, self.loader, self.schedule = engine, loader, schedule
        self.batch_size, self.micro_batch_size, self.clip_norm = batch_size, micro_batch_size, clip_norm
        self.progress = Progress()
        self._comm, self._group = comm, group

    @property
    def num_replicas(self) -> int:
        """Data-parallel ranks that share a global batch."""
        return self._group.size

    def step(
        self, *, stop_requested: bool = False, on_gradient: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Make one step.

        Args:
            stop_requested: this rank wants the run to end; the result tells all ranks.
            on_gradient: called between the reduction and the update, for tests that look at gradients.
        """
        num_samples = self.batch_size(self.progress.consumed_samples)
        microbatches = self._microbatches(num_samples)
        valid = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in microbatches)
        num_tokens, stop = self._agree(valid, int(stop_requested))
        for index, batch in enumerate(microbatches):
            self.engine.forward_backward(
                batch.input_ids,
                batch.labels,
                batch.document_starts,
                weight=1.0 / max(1, num_tokens),
                last=index == len(microbatches) - 1,
                step=self.progress.step,
                sample_numbers=batch.sample_numbers.tolist(),
            )
        summary = self.engine.reduce()
        on_gradient()
        decision = decide(summary.sum_of_squares, self.clip_norm)
        lr = self.schedule(self.progress.updates)
        nonfinite = None
        if decision.finite:
            self.engine.update(lr=lr, grad_scale=decision.scale)
        else:
            nonfinite = self.engine.first_nonfinite() or "the sum of squares of all gradients (overflow)"
            self.engine.discard()
        self._advance(num_samples, applied=decision.finite)
        return StepResult(
            step=self.progress.step,
            loss=summary.loss,
            grad_norm=decision.norm,
            lr=lr,
            num_samples=num_samples,
            num_tokens=num_tokens,
            nonfinite=nonfinite,
            stop=bool(stop),
        )

    def evaluate(self, loader: SampleSequence, num_samples: int) -> float:
        """Mean token loss over the first samples of a loader, in nats; the ranks share the samples.

        Args:
            loader: samples in fixed order.
            num_samples: how many; at most one epoch is used.
        """
        count = min(num_samples, len(loader))
        size = self.micro_batch_size
        loss_sum, num_tokens = 0.0, 0
        # Every rank makes the same number of equal passes, because a pass may contain collectives: rows past
        # the end are read but not counted.
        for start in range(0, count, self._group.size * size):
            batch = loader.batch(start + self._group.index * size, size)
            labels = np.where((batch.sample_numbers < count)[:, None], batch.labels, np.int32(IGNORED_LABEL))
            loss_sum += self.engine.loss_sum(batch.input_ids, labels, batch.document_starts)
            num_tokens += int((labels != IGNORED_LABEL).sum())
        parts = self._comm.exchange([loss_sum, num_tokens], self._group)
        return sum(part[0] for part in parts) / max(1, sum(part[1] for part in parts))

    def state(self) -> dict:
        """What a resumed run needs besides tensors, as JSON values."""
        return {
            "progress": asdict(self.progress),
            "data": self.loader.cursor(self.progress.consumed_samples),
            "loss_scale": self.engine.sharded.scaler.state(),
        }

    def load_state(self, state: dict) -> None:
        """Continue where :meth:`state` was taken; refuses another corpus, tokenizer or seed."""
        self.loader.check_cursor(state["data"])
        self.progress = Progress(**state["progress"])
        self.engine.optimizer.num_updates = self.progress.updates
        if "loss_scale" in state:  # checkpoints from before there was one
            self.engine.sharded.load_scale(state["loss_scale"])

    def _microbatches(self, num_samples: int) -> list[Batch]:
        """This rank's part of the next global batch."""
        count, rest = divmod(num_samples, self.micro_batch_size * self._group.size)
        assert rest == 0, f"{num_samples} samples are no whole microbatches on {self._group.size} ranks"
        return [
            self.loader.microbatch(
                self.progress.consumed_samples,
                index,
                dp_rank=self._group.index,
                dp_degree=self._group.size,
                micro_batch_size=self.micro_batch_size,
            )
            for index in range(count)
        ]

    def _agree(self, valid: int, stop: int) -> tuple[int, int]:
        """Valid tokens of the global batch, and how many ranks wish to stop."""
        local = Tensor(np.array([valid, stop], np.int64))
        num_tokens, stops = self._comm.all_reduce(local, self._comm.world).asnumpy().tolist()
        # All ranks of a replica have counted the same samples.
        return num_tokens * self._group.size // self._comm.world_size, stops

    def _advance(self, num_samples: int, *, applied: bool) -> None:
        self.progress.step += 1
        self.progress.consumed_samples += num_samples
        self.progress.updates += applied
        self.progress.skipped += not applied

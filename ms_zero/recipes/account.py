"""What a rank sends and holds for ZeRO, measured, beside what the theory says (`ms_zero.plan.zero`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ms_zero.comm import Counters
from ms_zero.monitor.units import format_bytes
from ms_zero.optim.optimizer import Optimizer
from ms_zero.plan.zero import held_bytes, step_traffic
from ms_zero.precision.policy import BYTES
from ms_zero.zero.groups import Groups
from ms_zero.zero.sharded import Sharded

_FP32_BYTES = 4


@dataclass(frozen=True)
class Account:
    """Bytes of one rank.

    Attributes:
        sent: in one step, over the groups that share parameters and gradients.
        sent_theory: the same by the formulas.
        weights: stored on the device.
        host_weights: stored in host memory.
        gradients: the most that was kept after a microbatch.
        optimizer: place ("device", "host", "nvme") -> state there.
        held_theory: weights, gradients and optimizer state, wherever they are, by the formulas.
    """

    sent: int
    sent_theory: float
    weights: int
    host_weights: int
    gradients: int
    optimizer: Mapping[str, int]
    held_theory: float

    @property
    def held(self) -> int:
        """Weights, gradients and optimizer state, wherever they are."""
        return self.weights + self.host_weights + self.gradients + sum(self.optimizer.values())

    def lines(self) -> list[str]:
        """For the log."""
        weights = format_bytes(self.weights)
        if self.host_weights:
            weights = f"{format_bytes(self.host_weights)} on the host"
        places = " + ".join(f"{format_bytes(size)} {place}" for place, size in self.optimizer.items())
        memory = (
            f"memory per rank: weights {weights}, gradients {format_bytes(self.gradients)}, "
            f"optimizer {places or '0B'}; together {format_bytes(self.held)}, "
            f"theory {format_bytes(self.held_theory)}"
        )
        if not self.sent_theory:  # nobody to send to
            return [memory]
        sent, theory = format_bytes(self.sent), format_bytes(self.sent_theory)
        return [f"traffic of weights and gradients: {sent} sent per rank and step, theory {theory}", memory]

    def fields(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "held": self.held}


def sent_bytes(counters: Counters, sharded: Sharded) -> int:
    """Bytes that this rank has sent so far over the groups that share parameters and gradients."""
    names = {group.name for groups in _sizes(sharded) for group in (groups.shard, groups.replica)}
    return sum(counters.total_bytes(group=name) for name in names)


def account(sharded: Sharded, optimizer: Optimizer, *, sent: int, num_microbatches: int) -> Account:
    """The account of one applied step of a rank.

    Args:
        sharded: after the step.
        optimizer: of the same model.
        sent: what :func:`sent_bytes` grew by in the step.
        num_microbatches: of the step.
    """
    held, k = sharded.held_bytes(), num_microbatches
    sent_theory, held_theory = 0.0, 0.0
    for groups, psi in _sizes(sharded).items():
        sent_theory += _sent_theory(sharded, groups, psi, k)
        held_theory += _held_theory(sharded, groups, psi, k, optimizer)
    places = {place: sum(kinds.values()) for place, kinds in optimizer.held_bytes().items()}
    return Account(
        sent=sent,
        sent_theory=sent_theory,
        weights=held["weights"],
        host_weights=held["host_weights"],
        gradients=sharded.most_gradient_bytes,
        optimizer={place: size for place, size in places.items() if size},
        held_theory=held_theory,
    )


def _sizes(sharded: Sharded) -> dict[Groups, int]:
    """Parameters of this rank's model by who shares them."""
    sizes: dict[Groups, int] = {}
    for bucket in sharded.all_buckets:
        sizes[bucket.groups] = sizes.get(bucket.groups, 0) + bucket.layout.size
    return sizes


def _sent_theory(sharded: Sharded, groups: Groups, psi: int, num_microbatches: int) -> float:
    options, policy = sharded.options, sharded.options.policy
    traffic = step_traffic(
        options.stage,
        num_microbatches,
        synchronise=options.synchronises,
        reshard_after_forward=options.reshard_after_forward,
        replicas=groups.replica.size,
    )
    sizes = {"weight": policy.weight_bytes, "wire": BYTES[policy.reduce], "kept": policy.gradient_bytes}
    return traffic.sent_bytes(psi, groups.shard.size, groups.replica.size, **sizes)


def _held_theory(
    sharded: Sharded, groups: Groups, psi: int, num_microbatches: int, optimizer: Optimizer
) -> float:
    options, policy = sharded.options, sharded.options.policy
    per_parameter = held_bytes(
        options.stage,
        groups.shard.size,
        weight=policy.weight_bytes,
        gradient=policy.gradient_bytes,
        master=_FP32_BYTES if policy.keeps_master else 0,
        moments=_FP32_BYTES * len(optimizer.moments),
        synchronise=options.synchronises or num_microbatches == 1,
    )
    return per_parameter.total * psi

"""How long a collective takes: latency and bandwidth, on one node or hierarchically over several.

A group is described by its size and its stride, the distance of neighbouring members in ranks (see
``ms_zero.mesh``: tp, cp, dp_shard, dp_replicate, pp, fastest first). Of a group, ``min(size, D // stride)``
consecutive members share a node of D devices; the rest of the way is between nodes. With V bytes in all, n
members, k on a node and N = n / k nodes, an all-gather or a reduce-scatter takes::

    (k - 1)/k V / intra  +  (N - 1)/N V/k / inter  +  latency

because the k members of a node share what comes from outside. Latency counts the log2(n) rounds of recursive
doubling, which moves the same volume as a ring's n - 1 hops. An all-reduce is one of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ms_zero.errors import UserError
from ms_zero.hardware import Device


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links of one kind of node.

    Args:
        devices_per_node: devices that share the fast links.
        intra_bandwidth: bytes per second and direction that a device reaches within a node.
        inter_bandwidth: the same between nodes.
        intra_latency: seconds of a message within a node.
        inter_latency: seconds of a message between nodes.

    """

    devices_per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    intra_latency: float
    inter_latency: float

    def gather(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, ``num_bytes`` on every member."""
        if size == 1:
            return 0.0
        near, far = self._split(size, stride)
        seconds = num_bytes * (near - 1) / near / self.intra_bandwidth
        seconds += num_bytes / near * (far - 1) / far / self.inter_bandwidth
        return seconds + _hops(near) * self.intra_latency + _hops(far) * self.inter_latency

    def all_reduce(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of an all-reduce of ``num_bytes``."""
        return 2 * self.gather(num_bytes, size, stride)

    def all_to_all(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds in which every member sends ``num_bytes``, an equal part to each member (one to itself)."""
        if size == 1:
            return 0.0
        near, far = self._split(size, stride)
        seconds = num_bytes * (near - 1) / size / self.intra_bandwidth
        seconds += num_bytes * (size - near) / size / self.inter_bandwidth
        return seconds + (near - 1) * self.intra_latency + (far - 1) * self.inter_latency

    def send(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of a message to the next member; the slowest hop of the group counts."""
        if self.within_node(size, stride):
            return num_bytes / self.intra_bandwidth + self.intra_latency
        return num_bytes / self.inter_bandwidth + self.inter_latency

    def within_node(self, size: int, stride: int) -> bool:
        """Say whether all members of a group share a node."""
        return size * stride <= self.devices_per_node

    def _split(self, size: int, stride: int) -> tuple[int, float]:
        """Members on one node, and nodes."""
        near = max(1, min(size, self.devices_per_node // stride))
        return near, size / near


def network_of(device: Device) -> Network:
    """Take the links from the catalogue; raises UserError naming the figures that it lacks."""
    names = ("devices_per_node", "intra_bandwidth", "inter_bandwidth", "intra_latency", "inter_latency")
    absent = [name for name in names if getattr(device, name) is None]
    if absent:
        raise UserError(
            f"cluster {device.name}: the catalogue has no {', '.join(absent)}; add a value and its source to "
            "the cluster's file, or name another cluster"
        )
    return Network(**{name: getattr(device, name) for name in names})


def _hops(size: float) -> int:
    return math.ceil(math.log2(size)) if size > 1 else 0

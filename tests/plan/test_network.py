"""Collectives: ring volumes, hierarchy, latency, and what is refused."""

from dataclasses import replace

import pytest

from ms_zero.errors import UserError
from ms_zero.hardware import load_device
from ms_zero.plan.network import Network, network_of

NETWORK = Network(
    devices_per_node=8, intra_bandwidth=50e9, inter_bandwidth=10e9, intra_latency=0.0, inter_latency=0.0
)
SLOW = replace(NETWORK, intra_latency=1.0, inter_latency=10.0)


def test_within_a_node_a_gather_moves_what_a_ring_moves():
    for size in (2, 4, 8):
        assert NETWORK.gather(1e9, size, 1) == pytest.approx(1e9 * (size - 1) / size / 50e9)
    assert NETWORK.gather(1e9, 1, 1) == 0.0
    assert NETWORK.all_reduce(1e9, 8, 1) == pytest.approx(2 * NETWORK.gather(1e9, 8, 1))


def test_members_on_a_node_share_what_comes_from_outside():
    across = NETWORK.gather(1e9, 16, 1)  # 8 members on each of 2 nodes
    assert across == pytest.approx(1e9 * 7 / 8 / 50e9 + 1e9 / 8 * 1 / 2 / 10e9)
    alone = NETWORK.gather(1e9, 2, 8)  # one member a node
    assert alone == pytest.approx(1e9 / 2 / 10e9)


def test_a_stride_beyond_the_node_leaves_it():
    assert NETWORK.within_node(4, 2)
    assert not NETWORK.within_node(4, 4)
    assert NETWORK.send(1e9, 2, 4) == pytest.approx(1e9 / 50e9)
    assert NETWORK.send(1e9, 2, 8) == pytest.approx(1e9 / 10e9)


def test_an_all_to_all_keeps_its_own_part():
    assert NETWORK.all_to_all(1e9, 4, 1) == pytest.approx(1e9 * 3 / 4 / 50e9)
    assert NETWORK.all_to_all(1e9, 4, 8) == pytest.approx(1e9 * 3 / 4 / 10e9)
    assert NETWORK.all_to_all(1e9, 1, 1) == 0.0


def test_latency_counts_rounds():
    assert SLOW.gather(0.0, 8, 1) == pytest.approx(3.0)
    assert SLOW.gather(0.0, 16, 1) == pytest.approx(3.0 + 10.0)
    assert SLOW.send(0.0, 2, 8) == pytest.approx(10.0)


def test_more_bytes_and_more_members_never_take_less():
    for size, stride in ((2, 1), (8, 1), (16, 1), (64, 4), (3, 8)):
        assert SLOW.gather(2e9, size, stride) > SLOW.gather(1e9, size, stride)
        assert SLOW.gather(1e9, 2 * size, stride) >= SLOW.gather(1e9, size, stride)


def test_the_catalogue_gives_the_links_or_says_what_is_absent():
    assert network_of(load_device("ascend-910b")).intra_bandwidth == 50e9
    with pytest.raises(UserError, match="cluster cpu: the catalogue has no devices_per_node"):
        network_of(load_device("cpu"))

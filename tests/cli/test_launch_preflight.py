"""Checks before the start: each refusal says what to change."""

import io
import socket
import threading

import pytest

from ms_zero import native
from ms_zero.cli import launch_preflight
from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_preflight import (
    Cluster,
    check_cluster,
    check_kernels,
    check_memory,
    check_output_dir,
    resolve,
    warn_of_tensor_groups,
)
from ms_zero.errors import UserError


def check(**arguments):
    defaults = {"workers": 2, "nodes": 1, "node_rank": None, "master": None, "port": None}
    return check_cluster(**{**defaults, **arguments})


def test_one_node_needs_nothing_but_workers():
    cluster = check()
    assert (cluster.master, cluster.node_rank, cluster.local_ranks) == ("127.0.0.1", 0, range(2))
    assert cluster.has_scheduler and 1024 <= cluster.port <= 65535


def test_second_node_has_the_later_ranks_and_no_scheduler():
    cluster = Cluster(workers=8, nodes=2, node_rank=1, master="192.0.2.1", port=8118)
    assert (cluster.local_workers, cluster.local_ranks) == (4, range(4, 8))
    assert not cluster.has_scheduler


def test_other_nodes_default_to_the_port_of_msrun():
    cluster = check(nodes=2, node_rank=1, master="192.0.2.1")
    assert cluster.port == launch_preflight.DEFAULT_PORT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "at least 1 worker"),
        ({"workers": -3}, "at least 1 worker"),
        ({"nodes": 0}, "at least 1 node"),
        ({"workers": 3, "nodes": 2, "node_rank": 0, "master": "localhost"}, "divisible by --nodes 2"),
        ({"nodes": 2, "master": "localhost"}, "needs --node-rank"),
        ({"nodes": 2, "node_rank": 0}, "needs --master"),
        ({"nodes": 2, "node_rank": 2, "master": "localhost"}, "use 0 to 1"),
        ({"node_rank": 1}, "use 0 to 0"),
        ({"port": 80}, "between 1024 and 65535"),
        ({"port": 70000}, "between 1024 and 65535"),
        ({"master": "192.0.2.1"}, "not an address of this machine"),
        ({"master": "no-such-host.invalid"}, "does not resolve"),
        ({"master": "a" * 80 + ".invalid"}, "does not resolve"),
        ({"nodes": 2, "node_rank": 1, "master": "127.0.0.1"}, "must be the machine with --node-rank 0"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_change(arguments, message):
    with pytest.raises(UserError) as refusal:
        check(**arguments)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            check(port=port)
    assert check(port=port).port == port


def test_name_service_that_does_not_answer_is_given_up(monkeypatch):
    answer = threading.Event()

    def slow(*arguments, **options):
        answer.wait(30)
        raise OSError("at last")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        with pytest.raises(UserError, match=r"--master slow did not resolve within 0\.05 s"):
            resolve("slow", timeout_s=0.05)
    finally:
        answer.set()


def test_output_dir_is_made_or_refused(tmp_path):
    check_output_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"train\.output_dir: cannot write to .*file/out"):
        check_output_dir(tmp_path / "file" / "out")
    with pytest.raises(UserError, match="cannot write to /proc/out"):
        check_output_dir(launch_preflight.Path("/proc/out"))


def test_more_workers_than_the_memory_holds_are_refused():
    check_memory(2)
    with pytest.raises(UserError, match=r"1000000 here need more than the \d+ GiB .* at most \d+ here"):
        check_memory(1_000_000)


def test_the_kernels_are_built_only_for_runs_that_use_them(monkeypatch):
    shown = io.StringIO()

    def build(announce):
        announce("building")
        raise UserError("no compiler")

    monkeypatch.setattr(native, "ensure_built", build)
    check_kernels("Ascend", "native", Console(shown))
    check_kernels("CPU", "portable", Console(shown))
    with pytest.raises(UserError, match="no compiler"):
        check_kernels("CPU", "native", Console(shown))
    assert shown.getvalue() == "ms-zero: building\n"


@pytest.mark.parametrize(
    ("tp", "workers", "nodes", "warned"),
    [(2, 4, 2, False), (4, 8, 2, False), (4, 4, 2, True), (3, 12, 3, True), (4, 4, 1, False)],
)
def test_tensor_parallel_groups_that_leave_a_node_are_warned_of(tp, workers, nodes, warned):
    shown = io.StringIO()
    warn_of_tensor_groups(tp, Cluster(workers, nodes, 0, "127.0.0.1", 1), Console(shown))
    assert shown.getvalue().startswith("ms-zero: warning: parallel.tp") is warned
    assert bool(shown.getvalue()) is warned

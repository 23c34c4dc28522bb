"""Noticing from another node that the scheduler is gone."""

import socket

from ms_zero.cli.launch_remote import SchedulerProbe


def test_scheduler_is_gone_after_two_refusals_in_a_row():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe = SchedulerProbe("127.0.0.1", port, interval_s=0.0)
        assert not probe.gone(), "nothing is probed before the start"
        probe.start()
        assert not any(probe.gone() for _ in range(5))
    assert [probe.gone() for _ in range(3)] == [False, True, True]
    with socket.create_server(("127.0.0.1", port)):
        assert not probe.gone(), "a scheduler that answers again is back"


def test_nothing_is_asked_between_probes():
    probe = SchedulerProbe("127.0.0.1", 1, interval_s=1000.0, patience=1)
    probe.start()
    assert probe.gone()
    assert not probe.gone()

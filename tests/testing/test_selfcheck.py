"""The self-check of collectives: it passes on good ones and names a wrong one."""

import pytest

from ms_zero.testing import WorkerError, run_workers


def check(comm, spoiled):
    from ms_zero.testing.selfcheck import check_collectives

    if spoiled:
        right = getattr(comm, spoiled)
        setattr(comm, spoiled, lambda *args: right(*args) + (1 if comm.rank == 1 else 0))
    return check_collectives(comm)


def test_every_collective_is_checked_on_three_workers():
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring", "exchange"]
    assert run_workers(3, check, "") == [names] * 3


@pytest.mark.parametrize("name", ["reduce_scatter", "recv"])
def test_a_wrong_result_is_named_with_its_rank(name):
    shown = {"recv": "ring"}.get(name, name)
    with pytest.raises(WorkerError, match=f"{shown} on rank 1 gave"):
        run_workers(2, check, name)

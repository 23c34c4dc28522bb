from fractions import Fraction

import pytest

from ms_zero.plan.zero import held_bytes, step_traffic

GB = 1e9


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 64])
def test_bytes_per_parameter_follow_the_published_formulas(degree):
    n = Fraction(degree)
    expected = {
        (2, 2, 4): (16, 4 + 12 / n, 2 + 14 / n, 16 / n),
        (2, 4, 4): (18, 6 + 12 / n, 2 + 16 / n, 18 / n),
        (4, 4, 0): (16, 8 + 8 / n, 4 + 12 / n, 16 / n),
    }
    for (weight, gradient, master), totals in expected.items():
        for stage, total in enumerate(totals):
            held = held_bytes(stage, degree, weight=weight, gradient=gradient, master=master)
            assert held.total == pytest.approx(float(total), rel=1e-12)


@pytest.mark.parametrize(
    ("degree", "billions", "stages"),
    [
        (1, 7.5, (120, 120, 120)),
        (4, 7.5, (52.5, 41.3, 30)),
        (16, 7.5, (35.6, 21.6, 7.5)),
        (64, 7.5, (31.4, 16.6, 1.88)),
        (1, 128, (2048, 2048, 2048)),
        (4, 128, (896, 704, 512)),
        (16, 128, (608, 368, 128)),
        (64, 128, (536, 284, 32)),
    ],
)
def test_table_1_of_the_zero_paper(degree, billions, stages):
    for stage, expected in enumerate(stages, 1):
        held = held_bytes(stage, degree, weight=2, gradient=2, master=4).total * billions
        unit = 10.0 ** -len(f"{expected}".partition(".")[2])
        assert abs(held - expected) <= unit, (stage, held, expected)


def test_volume_of_one_microbatch_is_2_2_2_3_psi():
    psi, degree = 1000, 4
    for stage, multiple in enumerate((2, 2, 2, 3)):
        sent = step_traffic(stage, 1).sent_bytes(psi, degree, 1, weight=2, wire=2, kept=2)
        assert sent == pytest.approx(multiple * psi * 2 * 3 / 4)


def test_volume_with_accumulation_and_replicas():
    def units(stage, k, **options):
        return step_traffic(stage, k, **options).sent_bytes(4, 4, 1, weight=1, wire=1, kept=1) / 3

    assert [units(stage, 5) for stage in range(4)] == [2, 2, 6, 15]
    assert [units(stage, 5, synchronise=False) for stage in range(4)] == [2, 2, 2, 11]
    assert [units(stage, 5, synchronise=True) for stage in range(4)] == [6, 6, 6, 15]
    assert units(3, 5, reshard_after_forward=False) == 10
    across = step_traffic(2, 1, replicas=2).sent_bytes(8, 4, 2, weight=0, wire=1, kept=1)
    assert across == 8 * 3 / 4 + 2 * (1 / 2) * 8 / 4

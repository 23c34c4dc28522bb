"""The numbers of a router: choices, weights, capacity, losses, and their gradient by finite differences."""

import itertools

import numpy as np
import pytest

from ms_zero.errors import UserError
from ms_zero.models.routing import Choice, Rules, choose, loads, scores, updated_bias, weigh, weigh_gradient

RNG = np.random.default_rng(3)


def logits_of(*probabilities):
    """Logits [1, T, E] whose softmax is given."""
    return np.log(np.array([probabilities], np.float64))


def test_the_highest_scores_are_chosen_in_descending_order():
    logits = logits_of([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
    assert choose(logits, None, Rules(top_k=2)).chosen.tolist() == [[[3, 2], [0, 1]]]


def test_of_equal_scores_the_lowest_number_comes_first():
    logits = logits_of([0.25] * 4, [0.1, 0.4, 0.1, 0.4])
    assert choose(logits, None, Rules(top_k=3)).chosen.tolist() == [[[0, 1, 2], [1, 3, 0]]]
    assert choose(np.zeros((1, 1, 300)), None, Rules(top_k=2)).chosen.tolist() == [[[0, 1]]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_has_a_part_in_the_choice_alone(score):
    rules = Rules(top_k=1, score=score, renormalise=False)
    logits = np.array([[[1.0, 0.9, 0.0]]])
    choice = choose(logits, np.array([0.0, 0.5, 0.0]), rules)
    assert choice.chosen.tolist() == [[[1]]]
    assert weigh(logits, choice, rules)[0][0, 0, 0] == scores(logits, score)[0, 0, 1]


def test_weights_are_scores_divided_by_their_sum_and_scaled():
    logits = logits_of([0.1, 0.2, 0.3, 0.4])
    choice = Choice(*[np.array([[[3, 2]]], np.int32)] * 2)
    for renormalise, expected in ((True, [4 / 7, 3 / 7]), (False, [0.4, 0.3])):
        rules = Rules(top_k=2, renormalise=renormalise, scaling=2.5)
        np.testing.assert_allclose(weigh(logits, choice, rules)[0][0, 0], 2.5 * np.array(expected))


def test_experts_come_from_the_best_groups():
    # Groups {0, 1}, {2, 3}, {4, 5}: by the best expert the third and first, by pairs the second and third.
    logits = logits_of([0.25, 0.01, 0.2, 0.2, 0.3, 0.04])
    softmax = Rules(top_k=3, groups=3, top_groups=2)
    assert choose(logits, None, softmax).chosen[0, 0].tolist() == [4, 0, 5]
    sigmoid = Rules(top_k=3, groups=3, top_groups=2, score="sigmoid")
    assert choose(logits, None, sigmoid).chosen[0, 0].tolist() == [4, 2, 3]


def test_an_expert_takes_the_first_tokens_of_a_sequence_up_to_its_capacity():
    logits = logits_of(*[[0.6, 0.3, 0.05, 0.05]] * 3, [0.05, 0.05, 0.3, 0.6])
    rules = Rules(top_k=2, capacity_factor=1.0)  # ceil(2 * 4 / 4) = 2 tokens of each sequence
    choice = choose(np.concatenate([logits, logits[:, ::-1]]), None, rules)
    assert choice.chosen[0].tolist() == [[0, 1], [0, 1], [0, 1], [3, 2]]
    assert choice.kept[0].tolist() == [[0, 1], [0, 1], [-1, -1], [3, 2]]
    assert choice.kept[1].tolist() == [[3, 2], [0, 1], [0, 1], [-1, -1]]
    weights, _ = weigh(logits, Choice(choice.chosen[:1], choice.kept[:1]), rules)
    np.testing.assert_allclose(weights[0], [[2 / 3, 1 / 3]] * 2 + [[0, 0], [2 / 3, 1 / 3]])


def test_capacity_is_rounded_up_and_dropless_is_the_default():
    logits = np.zeros((1, 5, 4))
    assert (choose(logits, None, Rules(top_k=1, capacity_factor=1.0)).kept >= 0).sum() == 2  # of 1.25
    assert (choose(logits, None, Rules(top_k=1, capacity_factor=4.0)).kept >= 0).all()
    assert (choose(logits, None, Rules(top_k=1)).kept >= 0).all()


def test_balance_is_one_when_experts_are_visited_evenly_and_their_number_when_one_takes_all():
    rules = Rules(top_k=1, balance_coefficient=1.0)
    even = np.log(np.full((1, 4, 4), 0.1) + 0.6 * np.eye(4))
    assert weigh(even, choose(even, None, rules), rules)[1] == pytest.approx(1.0)
    one = np.array([[[50.0, 0.0, 0.0, 0.0]] * 4])
    assert weigh(one, choose(one, None, rules), rules)[1] == pytest.approx(4.0)


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum():
    rules = Rules(top_k=1, z_coefficient=0.5)
    logits = np.array([[[0.0, 0.0], [1.0, 1.0]]])
    expected = 0.5 * (np.log(2) ** 2 + (1 + np.log(2)) ** 2) / 2
    assert weigh(logits, choose(logits, None, rules), rules)[1] == pytest.approx(expected)


def test_sequences_have_nothing_to_do_with_each_other():
    rules = Rules(top_k=2, score="sigmoid", capacity_factor=0.9, balance_coefficient=0.3, z_coefficient=0.1)
    logits = RNG.standard_normal((3, 7, 6)).astype(np.float32)
    choice = choose(logits, None, rules)
    weights, aux = weigh(logits, choice, rules)
    for row in range(3):
        alone = choose(logits[row : row + 1], None, rules)
        one_weights, one_aux = weigh(logits[row : row + 1], alone, rules)
        assert alone.kept.tobytes() == choice.kept[row].tobytes()
        assert one_weights.tobytes() == weights[row].tobytes() and one_aux[0] == aux[row]


VARIANTS = list(itertools.product(("softmax", "sigmoid"), (True, False), (1, 3), (None, 0.8)))


@pytest.mark.parametrize(("score", "renormalise", "groups", "factor"), VARIANTS)
def test_the_gradient_is_that_of_finite_differences(score, renormalise, groups, factor):
    rules = Rules(
        top_k=2, score=score, renormalise=renormalise, scaling=1.7, groups=groups, top_groups=min(groups, 2),
        capacity_factor=factor, balance_coefficient=0.6, z_coefficient=0.2,
    )  # fmt: skip
    logits = RNG.standard_normal((2, 5, 6))
    choice = choose(logits, None, rules)
    dweights, daux = RNG.standard_normal((2, 5, 2)), RNG.standard_normal(2)

    def scalar(values):
        weights, aux = weigh(values, choice, rules)
        return (weights * dweights).sum() + (aux * daux).sum()

    expected, step = np.zeros(logits.shape), 1e-6
    for index in np.ndindex(logits.shape):
        moved = [logits.copy(), logits.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        expected[index] = (scalar(moved[0]) - scalar(moved[1])) / (2 * step)
    gradient = weigh_gradient(logits, choice, rules, dweights, daux)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
    assert not weigh_gradient(logits, choice, rules, None, None).any()


def test_scores_do_not_overflow():
    logits = np.array([[[1e4, -1e4, 0.0]]], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        assert scores(logits, "sigmoid").tolist() == [[[1.0, 0.0, 0.5]]]
        assert scores(logits, "softmax").tolist() == [[[1.0, 0.0, 0.0]]]


def test_a_bias_rises_for_experts_with_little_load():
    chosen = np.array([[[0, 1], [0, 1], [0, 2], [0, 2]]])
    load = loads(chosen, 4)
    assert load.tolist() == [4, 2, 2, 0]
    moved = updated_bias(np.array([0.5, 0.0, 0.0, 0.0], np.float32), load, 0.001)
    np.testing.assert_allclose(moved, [0.499, 0.0, 0.0, 0.001], rtol=1e-6)
    assert moved.dtype == np.float32


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(top_k=5), "5 experts a token, expected 1 to 4"),
        (Rules(top_k=0), "0 experts a token"),
        (Rules(top_k=1, groups=3), "1 of 3 groups of 4 experts"),
        (Rules(top_k=1, groups=2, top_groups=3), "3 of 2 groups"),
        (Rules(top_k=3, groups=2, top_groups=1), "3 experts a token, expected 1 to 2"),
    ],
)
def test_rules_that_do_not_fit_the_experts_are_refused(rules, message):
    with pytest.raises(UserError, match=message):
        rules.check(4)

import json
from dataclasses import replace

import pytest

from ms_zero.data.cursor import Cursor, check_cursor
from ms_zero.errors import UserError

RUN = Cursor(0, "0123456789abcdef" * 4, seed=1234, seq_len=128, corpus="Python 3.11.2 standard library")


def test_a_saved_cursor_gives_back_its_samples():
    state = json.loads(json.dumps(replace(RUN, consumed_samples=6400).state()))
    assert check_cursor(state, RUN) == 6400
    assert check_cursor(state, replace(RUN, corpus="the same text, moved")) == 6400


def test_another_corpus_is_refused_with_both_names():
    other = replace(RUN, fingerprint="f" * 64, corpus="Python 3.12.1 standard library")
    with pytest.raises(UserError, match=r"Python 3.11.2 .*\[0123456789ab\].*Python 3.12.1 .*\[f{12}\]"):
        check_cursor(RUN.state(), other)


@pytest.mark.parametrize(("key", "path"), [("seed", "train.seed"), ("seq_len", "data.seq_len")])
def test_what_changes_the_sequence_is_refused_with_the_old_value(key, path):
    with pytest.raises(UserError, match=rf"{path}=99 would change .* set {path}={getattr(RUN, key)}"):
        check_cursor(RUN.state(), replace(RUN, **{key: 99}))


@pytest.mark.parametrize(
    "damage",
    [
        {"consumed_samples": -1},
        {"consumed_samples": 1.5},
        {"consumed_samples": True},
        {"fingerprint": None},
        {"seed": "1234"},
        {"extra": 1},
    ],
)
def test_a_damaged_cursor_is_refused(damage):
    with pytest.raises(UserError, match="data cursor is damaged"):
        check_cursor(RUN.state() | damage, RUN)


@pytest.mark.parametrize("key", RUN.state())
def test_a_missing_field_is_refused(key):
    state = RUN.state()
    del state[key]
    with pytest.raises(UserError, match=rf"damaged: expected the fields .*{key}"):
        check_cursor(state, RUN)


@pytest.mark.parametrize("state", [None, [], "cursor"])
def test_something_else_is_refused(state):
    with pytest.raises(UserError, match="damaged"):
        check_cursor(state, RUN)

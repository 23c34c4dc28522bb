"""The data cursor: what a checkpoint must remember to go on with exactly the next sample."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ms_zero.errors import UserError


@dataclass(frozen=True)
class Cursor:
    """Position in a sequence of samples, and what defines that sequence.

    Attributes:
        consumed_samples: samples already used; the next one has this number.
        fingerprint: of the corpus, its split and the tokenizer.
        seed: of the order.
        seq_len: positions per sample.
        corpus: where the text came from, for messages only.
    """

    consumed_samples: int
    fingerprint: str
    seed: int
    seq_len: int
    corpus: str

    def state(self) -> dict[str, int | str]:
        """The cursor as a JSON object."""
        return asdict(self)


def check_cursor(state: Mapping[str, Any], run: Cursor) -> int:
    """Consumed samples of a saved cursor, if this run reads the same sequence.

    Args:
        state: what ``Cursor.state()`` gave when the checkpoint was written.
        run: the sequence that this run reads; its own ``consumed_samples`` does not matter.

    Raises:
        UserError: the state is no cursor, or corpus, seed or sample length differ.
    """
    saved = _from_state(state)
    if saved.fingerprint != run.fingerprint:
        raise UserError(
            f"the checkpoint was trained on another corpus, split or tokenizer: {saved.corpus} "
            f"[{saved.fingerprint[:12]}], this run reads {run.corpus} [{run.fingerprint[:12]}]; restore the "
            "data section and files it was trained with, or start afresh with checkpoint.resume=never"
        )
    for key, path in (("seed", "train.seed"), ("seq_len", "data.seq_len")):
        old, new = getattr(saved, key), getattr(run, key)
        if old != new:
            raise UserError(
                f"{path}={new} would change the sequence of samples: the checkpoint has {old}; set "
                f"{path}={old}, or start afresh with checkpoint.resume=never"
            )
    return saved.consumed_samples


def _from_state(state: Mapping[str, Any]) -> Cursor:
    kinds = {"consumed_samples": int, "fingerprint": str, "seed": int, "seq_len": int, "corpus": str}
    damaged = "the checkpoint's data cursor is damaged: "
    if not isinstance(state, Mapping) or set(state) != set(kinds):
        raise UserError(damaged + f"expected the fields {', '.join(kinds)}")
    for key, kind in kinds.items():
        if not isinstance(state[key], kind) or isinstance(state[key], bool):
            raise UserError(damaged + f"{key}={state[key]!r}, expected {kind.__name__}")
    if state["consumed_samples"] < 0:
        raise UserError(damaged + f"consumed_samples={state['consumed_samples']}, expected at least 0")
    return Cursor(**state)

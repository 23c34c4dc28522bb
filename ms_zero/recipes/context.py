"""Which part of its samples an engine computes: all of them, or some tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from mindspore import Tensor, nn

from ms_zero.comm import ProcessMesh
from ms_zero.data import DocumentResets
from ms_zero.parallel.context import ContextPart, Spans, cut_context, cut_spans, positions_of

SpansOf = Callable[[int], Sequence[tuple[int, int]]]


class Samples(Protocol):
    """What a rank makes of a batch of whole samples."""

    def inputs(
        self, input_ids: np.ndarray, document_starts: np.ndarray | None, resets: DocumentResets
    ) -> dict[str, np.ndarray]:
        """The model's arguments by name, for int32 [B, T] ids and starts."""

    def labels(self, labels: np.ndarray) -> np.ndarray:
        """Labels int32 [B, T] -> those of the tokens that the model computes."""

    def spans(self, length: int, inner: SpansOf | None) -> Sequence[tuple[int, int]] | None:
        """The tokens of a sample that dropouts see; None: all.

        `inner`: the same for a rank that computes `length` tokens, of which it keeps a part between regions.
        """

    def total(self, loss: Tensor) -> Tensor:
        """The loss of the whole samples, given that of this rank's tokens."""


class WholeSamples:
    """Every token of the samples."""

    def inputs(
        self, input_ids: np.ndarray, document_starts: np.ndarray | None, resets: DocumentResets
    ) -> dict[str, np.ndarray]:
        """The ids, and what is reset."""
        return {"input_ids": input_ids, **resets.arguments(document_starts)}

    def labels(self, labels: np.ndarray) -> np.ndarray:
        """The labels."""
        return labels

    def spans(self, length: int, inner: SpansOf | None) -> Sequence[tuple[int, int]] | None:
        """What is inside."""
        return None if inner is None else inner(length)

    def total(self, loss: Tensor) -> Tensor:
        """The loss."""
        return loss


class CutSamples:
    """The tokens of one context-parallel rank.

    Labels were shifted when the samples were made, so the last token of a chunk has the first of the next one
    as its label, whoever computes that.
    """

    def __init__(self, part: ContextPart) -> None:
        self._part = part

    def inputs(
        self, input_ids: np.ndarray, document_starts: np.ndarray | None, resets: DocumentResets
    ) -> dict[str, np.ndarray]:
        """The own ids and their positions; documents' starts of the whole samples."""
        arguments = resets.arguments(document_starts)
        positions = arguments.pop("position_ids", None)
        if positions is None:
            arguments["position_ids"] = positions_of(self._part.spans(input_ids.shape[1]))
        else:
            arguments["position_ids"] = self._part.own(positions)
        return {"input_ids": self._part.own(input_ids), **arguments}

    def labels(self, labels: np.ndarray) -> np.ndarray:
        """The own labels."""
        return self._part.own(labels)

    def spans(self, length: int, inner: SpansOf | None) -> Spans:
        """The own ranges, and of these what is inside."""
        own = self._part.spans(length)
        if inner is None:
            return own
        parts = inner(sum(stop - start for start, stop in own))
        return tuple(span for start, stop in parts for span in cut_spans(own, start, stop))

    def total(self, loss: Tensor) -> Tensor:
        """The sum over the ranks."""
        return self._part.comm.all_reduce(loss.reshape((1,)), self._part.group).reshape(())


def cut_samples(model: nn.Cell, pmesh: ProcessMesh, method: str) -> Samples:
    """Cut a model's samples over the mesh's ``cp`` axis; with one rank there they stay whole."""
    part = ContextPart(pmesh.comm, pmesh.group("cp"), method)
    if part.group.size == 1:
        return WholeSamples()
    cut_context(model, part)
    return CutSamples(part)

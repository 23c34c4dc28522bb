"""What the borders of packed documents mean to a model."""

from dataclasses import dataclass

import numpy as np

from ms_zero.errors import UserError


@dataclass(frozen=True)
class DocumentResets:
    """What restarts where a document begins inside a sample.

    With both, a packed sample gives each document the logits that it would get alone (a document that began
    in an earlier sample: what is left of it would get). With none, a sample is one text.

    Attributes:
        attention: tokens attend only within their document.
        positions: positions count from the beginning of the document.
    """

    attention: bool = False
    positions: bool = False

    def arguments(self, document_starts: np.ndarray | None) -> dict[str, np.ndarray]:
        """What a model must be told besides input_ids, int32[B, T] each, by the name of its argument.

        ``position_ids`` are the places of tokens in their documents, ``document_starts`` the first positions
        that they may attend to; each only if it is reset.

        Args:
            document_starts: int32[B, T] of the batch, see :class:`~ms_zero.data.packing.Sample`.

        Raises:
            UserError: something is reset, but the data does not say where documents begin.
        """
        if not (self.attention or self.positions):
            return {}
        if document_starts is None:
            raise UserError(
                "data.reset_attention and data.reset_positions need documents, but this data has no borders"
            )
        arguments = {}
        if self.positions:
            positions = np.arange(document_starts.shape[-1], dtype=np.int32)
            arguments["position_ids"] = positions - document_starts
        if self.attention:
            arguments["document_starts"] = document_starts
        return arguments


NO_RESETS = DocumentResets()
"""A sample is one text, whatever documents it is packed of."""

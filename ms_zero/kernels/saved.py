"""What a kernel keeps between forward and backward, as data for whoever counts memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """One tensor that backward reads.

    Attributes:
        name: the argument or result it is.
        elements: its size.
        dtype: "input" for the dtype of the activations, else "fp32" or "int32".
        role: "input" and "output" are tensors that exist anyway and are kept alive; "extra" exists only for
            backward. Parameters are not listed: no kernel keeps a copy of one.
    """

    name: str
    elements: int
    dtype: str = "input"
    role: str = "input"

"""The dtype policy: in which dtype weights are kept, computed with, reduced, accumulated and updated.

The tensors of mixed-precision training (Micikevicius et al. 2018, arXiv:1710.03740) and their names here:

- stored weights: what forward and backward read; gathered under ZeRO. Dtype ``param``.
- working copy: the stored weights of one unit as a device computes with them. Dtype `Working.dtype`; alive
  only while its unit runs, so it is not counted in the bytes per parameter.
- activations: dtype `Working.dtype`; the inside of norms, softmax and losses is fp32 in every policy.
- gradient on the wire: dtype ``reduce``. Reduced gradient: dtype ``accumulate``.
- master weights: the fp32 copy that only the optimizer writes; stored weights are cast from it.
- moments of the optimizer: fp32 in every policy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import mindspore as ms

from ms_zero.errors import UserError

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": ms.float32, "bf16": ms.bfloat16, "fp16": ms.float16}
_MASTERS = ("fp32", "param")
_MOMENT_BYTES = 2 * BYTES["fp32"]
# CPU has kernels for bf16 casts and plain arithmetic only.
_WITHOUT_BF16 = ("CPU",)


@dataclass(frozen=True)
class Working:
    """How a device computes.

    Attributes:
        dtype: of working weights and activations.
        grid: "bf16" when values of ``dtype`` are rounded to the values that bf16 can represent, else None.
    """

    dtype: ms.Type
    grid: str | None


@dataclass(frozen=True)
class Policy:
    """A frozen choice of dtypes; each is "fp32", "bf16" or "fp16".

    Raises UserError for combinations that lose range or memory for nothing: see :func:`policy` for the usual
    ones. Bytes are per parameter and, under ZeRO, divided by the ranks that share them.

    Attributes:
        param: Stored weights, and what ZeRO-3 gathers. Default "fp32": 4 bytes, and no second copy of the
            weights because they are the master weights. 16 bits: 2 bytes, and half the traffic of gathering.
        compute: Matrix products and activations. Default "fp32". 16 bits: half the activation memory where
            the device has kernels for it. Not wider than ``param``: widened weights gain no information.
        reduce: Gradients on the wire of the reduction. Default "fp32": 4 bytes an element and exact to fp32.
            16 bits: half the traffic; every addend is rounded, and with a backend that sums in the dtype on
            the wire so is every partial sum.
        accumulate: Reduced gradients, kept until the update and added up over microbatches. Default "fp32":
            4 bytes. 16 bits: 2 bytes, and every addition rounds (k microbatches round k times).
        master: "fp32" (default): 16-bit weights are accompanied by an fp32 copy of 4 bytes, so that small
            updates are not lost. "param": the optimizer writes the stored weights; with a 16-bit ``param``
            that saves 4 bytes and loses every update below half a unit in the last place.
    """

    param: str = "fp32"
    compute: str = "fp32"
    reduce: str = "fp32"
    accumulate: str = "fp32"
    master: str = "fp32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), _MASTERS if field.name == "master" else tuple(BYTES)
            if value not in allowed:
                raise UserError(
                    f"precision: {field.name} is {value!r}: expected one of {', '.join(map(repr, allowed))}"
                )
        if BYTES[self.compute] > BYTES[self.param]:
            raise UserError(
                f"precision: compute {self.compute} is wider than param {self.param}: use param "
                f"{self.compute}, or compute {self.param}"
            )
        if len(self.half_formats) > 1:
            raise UserError(
                f"precision: {' and '.join(self.half_formats)} in one policy ({self}): their ranges differ: "
                f"values would overflow or vanish; use one of them, or fp32"
            )

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))

    @property
    def half_formats(self) -> tuple[str, ...]:
        """The 16-bit formats in use, sorted; at most one in a valid policy."""
        used = {self.param, self.compute, self.reduce, self.accumulate}
        return tuple(sorted(used - {"fp32"}))

    @property
    def keeps_master(self) -> bool:
        """Whether the optimizer keeps an fp32 copy beside the stored weights."""
        return self.master == "fp32" and self.param != "fp32"

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether gradients pass through fp16, where small ones vanish without a loss scale."""
        return "fp16" in self.half_formats

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter of the stored weights."""
        return BYTES[self.param]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of the reduced gradient."""
        return BYTES[self.accumulate]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per parameter of Adam's state: two fp32 moments, and the master weights if kept."""
        return _MOMENT_BYTES + (BYTES["fp32"] if self.keeps_master else 0)

    def working(self, target: str) -> Working:
        """How ``target`` ("CPU", "GPU" or "Ascend", or a variant such as "CPU-portable") computes.

        bf16 on CPU is emulated: fp32 kernels on values that bf16 can represent.
        """
        if self.compute == "bf16" and target.split("-")[0] in _WITHOUT_BF16:
            return Working(ms.float32, "bf16")
        return Working(DTYPES[self.compute], None)

    def describe(self, target: str) -> str:
        """One line for the log: the dtypes, and what is emulated on ``target``."""
        working = self.working(target)
        if working.grid is None:
            return f"{self}; {self.compute} kernels of {target}"
        return (
            f"{self}; {target} has no {working.grid} kernels: weights and gradients are "
            f"stored and communicated as above, activations are fp32 rounded to {working.grid} values"
        )


_PRESETS = {
    "fp32": Policy(),
    "bf16": Policy(param="bf16", compute="bf16"),
    "fp16": Policy(param="fp16", compute="fp16"),
}


def policy(name: str) -> Policy:
    """The usual policy of a name: "fp32", "bf16" or "fp16".

    A 16-bit preset stores and computes in 16 bits and reduces, accumulates and updates in fp32: 2 + 4 + 12
    bytes per parameter with Adam; with ``accumulate`` in 16 bits 2 + 2 + 12. Other names: UserError.
    """
    if name not in _PRESETS:
        raise UserError(f"precision: unknown policy {name!r}: expected one of {', '.join(_PRESETS)}")
    return _PRESETS[name]

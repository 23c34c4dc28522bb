"""Layers with parameters, shared by the models.

Parameters are created on the meta device: they have name, shape and dtype but no storage, and using one
before it is initialised is an error.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.models.init import Normal, Ones, ParameterRule, Zeros


def empty_parameter(*shape: int) -> Parameter:
    """Return an fp32 parameter without storage."""
    return Parameter(mint.empty(shape, dtype=ms.float32, device="meta"))


def name_parameters_by_path(model: nn.Cell) -> None:
    """Set the name of each parameter to its path in `model`; a shared one gets the path met first."""
    for path, parameter in model.parameters_and_names():
        parameter.name = path


class Linear(nn.Cell):
    """y = x W^T + b with weight [out, in] and bias [out].

    init_std: standard deviation of the initial weight. weight: an existing parameter to share (tied head).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init_std: float,
        weight: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features) if weight is None else weight
        self.bias = empty_parameter(out_features) if bias else None
        self.linear = kernels.Linear()
        self.parameter_rules = {
            "weight": ParameterRule(Normal(init_std), decay=True),
            "bias": ParameterRule(Zeros(), decay=False),
        }

    def construct(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        return self.linear(x, self.weight, self.bias)


class Embedding(nn.Cell):
    """Rows of weight [num_embeddings, hidden_size] by index."""

    def __init__(self, num_embeddings: int, hidden_size: int, *, init_std: float) -> None:
        super().__init__()
        self.weight = empty_parameter(num_embeddings, hidden_size)
        self.embedding = kernels.Embedding()
        self.parameter_rules = {"weight": ParameterRule(Normal(init_std), decay=False)}

    def construct(self, indices: Tensor) -> Tensor:
        """Map int32 indices [...] to [..., hidden_size]."""
        return self.embedding(self.weight, indices)


class LayerNorm(nn.Cell):
    """Layer normalisation over the last dim with weight and bias [hidden_size]."""

    keeps_fp32 = True  # read by ms_zero.precision

    def __init__(self, hidden_size: int, *, eps: float, target: str | None) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size)
        self.bias = empty_parameter(hidden_size)
        self.layer_norm = kernels.LayerNorm(eps, target)
        self.widens_itself = self.layer_norm.takes_fp32_weights
        self.parameter_rules = {
            "weight": ParameterRule(Ones(), decay=False),
            "bias": ParameterRule(Zeros(), decay=False),
        }

    def construct(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden_size]."""
        return self.layer_norm(x, self.weight, self.bias)


class RMSNorm(nn.Cell):
    """Root-mean-square normalisation over the last dim with weight [size]."""

    keeps_fp32 = True  # read by ms_zero.precision

    def __init__(self, size: int, *, eps: float, target: str | None) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.rms_norm = kernels.RMSNorm(eps, target)
        self.widens_itself = self.rms_norm.takes_fp32_weights
        self.parameter_rules = {"weight": ParameterRule(Ones(), decay=False)}

    def construct(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        return self.rms_norm(x, self.weight)


class Positions(nn.Cell):
    """The positions 0 ... T-1 of a sequence, at most `max_seq_len` of them."""

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        cache: dict[int, Tensor] = {}

        def positions(length: int) -> Tensor:
            if length > max_seq_len:
                raise UserError(
                    f"model: a sequence of {length} tokens exceeds max_seq_len {max_seq_len}: "
                    f"shorten the sequence or raise max_seq_len"
                )
            if length not in cache:
                cache[length] = Tensor(np.arange(length, dtype=np.int32))
            return cache[length]

        # constexpr: runs as Python in both modes (in graph mode at compile time).
        self.positions = ms.constexpr(positions)

    def construct(self, input_ids: Tensor) -> Tensor:
        """Return int32 [T] for input_ids [B, T]; raises UserError for T > max_seq_len."""
        return self.positions(input_ids.shape[-1])


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape [B, T, heads * head_dim] to [B, T, heads, head_dim]."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, -1, head_dim)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape [B, T, heads, head_dim] to [B, T, heads * head_dim]."""
    batch, length, _, _ = x.shape
    return x.reshape(batch, length, -1)

"""Layers with parameters, shared by the models.

Parameters are created on the meta device: they have name, shape and dtype but no storage, and using one
before it is initialised is an error.
"""

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_zero import kernels
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
        self.gather = ops.Gather()
        self.parameter_rules = {"weight": ParameterRule(Normal(init_std), decay=False)}

    def construct(self, indices: Tensor) -> Tensor:
        """Map int32 indices [...] to [..., hidden_size]."""
        return self.gather(self.weight, indices, 0)


class LayerNorm(nn.Cell):
    """Layer normalisation over the last dim with weight and bias [hidden_size]."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size)
        self.bias = empty_parameter(hidden_size)
        self.layer_norm = kernels.LayerNorm(eps)
        self.parameter_rules = {
            "weight": ParameterRule(Ones(), decay=False),
            "bias": ParameterRule(Zeros(), decay=False),
        }

    def construct(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden_size]."""
        return self.layer_norm(x, self.weight, self.bias)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape [B, T, heads * head_dim] to [B, heads, T, head_dim]."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, -1, head_dim).transpose(0, 2, 1, 3)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape [B, heads, T, head_dim] to [B, T, heads * head_dim]."""
    batch, _, length, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, -1)

"""Matrix product with a weight stored [out, in]."""

from mindspore import Tensor, nn, ops


class Linear(nn.Cell):
    """y = x W^T + b: x [..., in], weight [out, in], bias [out] or None -> [..., out].

    The product takes the weight as it is stored, so that autograd keeps a reference to the parameter and no
    transposed copy of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_a=False, transpose_b=True)
        self.bias_add = ops.BiasAdd()

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the product."""
        y = self.matmul(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            y = self.bias_add(y, bias)
        return y.reshape((*x.shape[:-1], weight.shape[0]))

"""GPT: learned positions, pre-LayerNorm, GELU, optionally tied output head (Radford et al. 2019)."""

import math

import mindspore as ms
from mindspore import Tensor, nn

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.models.dropout import Dropout, DropoutState, name_dropouts_by_path
from ms_zero.models.layers import (
    Embedding,
    LayerNorm,
    Linear,
    Positions,
    merge_heads,
    name_parameters_by_path,
    split_heads,
)


class GPTAttention(nn.Cell):
    """Causal multi-head self-attention with biases on all four projections."""

    def __init__(
        self, hidden_size: int, num_heads: int, *, init_std: float, residual_std: float, target: str | None
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.q_proj = Linear(hidden_size, hidden_size, bias=True, init_std=init_std)
        self.k_proj = Linear(hidden_size, hidden_size, bias=True, init_std=init_std)
        self.v_proj = Linear(hidden_size, hidden_size, bias=True, init_std=init_std)
        self.c_proj = Linear(hidden_size, hidden_size, bias=True, init_std=residual_std)
        self.attention = kernels.CausalAttention(1.0 / math.sqrt(self.head_dim), target)

    def construct(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]; mask: see `kernels.CausalAttention`."""
        # The number of heads follows from the width of the projections.
        q = split_heads(self.q_proj(x), self.head_dim)
        k = split_heads(self.k_proj(x), self.head_dim)
        v = split_heads(self.v_proj(x), self.head_dim)
        return self.c_proj(merge_heads(self.attention(q, k, v, mask)))


class GPTMLP(nn.Cell):
    """Two projections with a GELU between them."""

    def __init__(
        self, hidden_size: int, ffn_size: int, *, init_std: float, residual_std: float, target: str | None
    ) -> None:
        super().__init__()
        self.c_fc = Linear(hidden_size, ffn_size, bias=True, init_std=init_std)
        self.act = kernels.GELU(target)
        self.c_proj = Linear(ffn_size, hidden_size, bias=True, init_std=residual_std)

    def construct(self, x: Tensor) -> Tensor:
        """Map x [B, T, H] to [B, T, H]."""
        return self.c_proj(self.act(self.c_fc(x)))


class GPTBlock(nn.Cell):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_size: int,
        *,
        norm_eps: float,
        init_std: float,
        residual_std: float,
        dropout: float,
        dropout_state: DropoutState | None,
        target: str | None,
    ) -> None:
        super().__init__()
        stds = {"init_std": init_std, "residual_std": residual_std}
        self.ln_1 = LayerNorm(hidden_size, eps=norm_eps, target=target)
        self.attn = GPTAttention(hidden_size, num_heads, target=target, **stds)
        self.ln_2 = LayerNorm(hidden_size, eps=norm_eps, target=target)
        self.mlp = GPTMLP(hidden_size, ffn_size, target=target, **stds)
        self.attn_dropout = Dropout(dropout, dropout_state) if dropout_state else None
        self.mlp_dropout = Dropout(dropout, dropout_state) if dropout_state else None

    def construct(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]; mask: see `kernels.CausalAttention`."""
        y = self.attn(self.ln_1(x), mask)
        x = x + (y if self.attn_dropout is None else self.attn_dropout(y))
        y = self.mlp(self.ln_2(x))
        return x + (y if self.mlp_dropout is None else self.mlp_dropout(y))


class GPTTransformer(nn.Cell):
    """Embeddings, blocks and final norm."""

    chained_blocks = ("h",)  # see ms_zero.memory.segment

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        ffn_hidden_size: int,
        max_seq_len: int,
        norm_eps: float,
        init_std: float,
        dropout: float,
        dropout_state: DropoutState | None,
        target: str | None,
    ) -> None:
        super().__init__()
        self.wte = Embedding(vocab_size, hidden_size, init_std=init_std)
        self.wpe = Embedding(max_seq_len, hidden_size, init_std=init_std)
        self.positions = Positions(max_seq_len)
        blocks = [
            GPTBlock(
                hidden_size,
                num_heads,
                ffn_hidden_size,
                norm_eps=norm_eps,
                init_std=init_std,
                residual_std=init_std / math.sqrt(2 * num_layers),
                dropout=dropout,
                dropout_state=dropout_state,
                target=target,
            )
            for _ in range(num_layers)
        ]
        self.dropout = Dropout(dropout, dropout_state) if dropout_state else None
        self.document_mask = kernels.DocumentMask(target)
        self.h = nn.CellList(blocks)
        self.ln_f = LayerNorm(hidden_size, eps=norm_eps, target=target)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Map int32 ids [B, T] to hidden states [B, T, H]; the other arguments are those of `GPT`."""
        if position_ids is None:
            position_ids = self.positions(input_ids)
        x = self.wte(input_ids) + self.wpe(position_ids)
        if self.dropout is not None:
            x = self.dropout(x)
        mask = None if document_starts is None else self.document_mask(document_starts, x)
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)


class GPT(nn.Cell):
    """GPT language model: int32 input_ids [B, T] -> fp32 logits [B, T, vocab_size].

    Parameters are created without storage; see `ms_zero.models.initialise`. target: device target of the
    kernels, None for the current one. Raises UserError when num_heads does not divide hidden_size, for a
    dropout outside [0, 1) and, when called, for T > max_seq_len.

    dropout: rate after the embeddings and after attention and MLP of each block, as in GPT-2. The attention
    probabilities get none: fused kernels never hold them. With a rate above 0, `dropout_state` has to be told
    the position of each forward pass; else it is None.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        ffn_hidden_size: int,
        max_seq_len: int,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        target: str | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise UserError(f"model: num_heads {num_heads} does not divide hidden_size {hidden_size}")
        self.dropout_state = DropoutState() if dropout else None
        self.transformer = GPTTransformer(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            ffn_hidden_size=ffn_hidden_size,
            max_seq_len=max_seq_len,
            norm_eps=norm_eps,
            init_std=init_std,
            dropout=dropout,
            dropout_state=self.dropout_state,
            target=target,
        )
        shared = self.transformer.wte.weight if tie_embeddings else None
        self.lm_head = Linear(hidden_size, vocab_size, bias=False, init_std=init_std, weight=shared)
        name_parameters_by_path(self)
        name_dropouts_by_path(self)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Return the logits.

        position_ids: int32 [T] or [B, T]; None: 0 ... T-1. document_starts: int32 [B, T], the first position
        that each token may attend to; None: the first of the sequence.
        """
        hidden = self.transformer(input_ids, position_ids, document_starts)
        return self.lm_head(hidden).astype(ms.float32)

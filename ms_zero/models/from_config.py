"""From the configuration of a model with experts to the model."""

from ms_zero.config import MoEConfig
from ms_zero.models.decoder import MoEDecoder
from ms_zero.models.moe import Mixture
from ms_zero.models.routing import Rules


def build_decoder(config: MoEConfig, target: str | None = None) -> MoEDecoder:
    """The plain model; its parameters have shapes and no values yet. ``target``: of its kernels."""
    return MoEDecoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_seq_len=config.max_seq_len,
        mixture=mixture_of(config),
        latent=config.latent,
        dense_layers=config.dense_layers,
        ffn_hidden_size=config.ffn_hidden_size,
        norm_eps=config.norm_eps,
        init_std=config.init_std,
        tie_embeddings=config.tie_embeddings,
        rope_theta=config.rope_theta,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        dropout=config.dropout,
        target=target,
    )


def mixture_of(config: MoEConfig) -> Mixture:
    """What the layers with experts are made of."""
    rules = Rules(
        top_k=config.experts_per_token,
        score=config.router,
        renormalise=config.renormalise,
        scaling=config.routed_scaling,
        groups=config.expert_groups,
        top_groups=config.groups_per_token,
        capacity_factor=config.capacity_factor,
        balance_coefficient=config.balance_coefficient,
        z_coefficient=config.z_coefficient,
    )
    return Mixture(
        num_experts=config.num_experts,
        ffn_hidden_size=config.expert_ffn_hidden_size,
        rules=rules,
        shared_ffn_hidden_size=config.shared_ffn_hidden_size,
        shared_gate=config.shared_gate,
        bias_speed=config.router_bias_speed if config.router_bias else None,
    )

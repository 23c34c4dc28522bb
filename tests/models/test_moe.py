"""Layers with experts against a token-by-token computation in float64, and what rides along in a model."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import _compat, kernels
from ms_zero.config import LatentConfig
from ms_zero.errors import UserError
from ms_zero.memory import apply_recompute
from ms_zero.models import Mixture, MoEDecoder, Rules, decay_names, initialise, take_loads
from ms_zero.models.latent import LatentAttention
from ms_zero.models.moe import MoE
from ms_zero.models.routing import choose, weigh
from ms_zero.precision.autocast import apply as autocast
from ms_zero.precision.autocast import fp32_parameters
from ms_zero.precision.policy import policy

RNG = np.random.default_rng(11)
HIDDEN, FFN, EXPERTS, BATCH, LENGTH = 6, 5, 4, 2, 5
LOSSES = {"balance_coefficient": 0.7, "z_coefficient": 0.3}
VARIANTS = {
    "mixtral": {"rules": Rules(top_k=2, **LOSSES)},
    "drops tokens": {"rules": Rules(top_k=2, capacity_factor=0.7, **LOSSES)},
    "deepseek-v2": {
        "rules": Rules(top_k=2, renormalise=False, scaling=3.0, groups=2, top_groups=1, **LOSSES),
        "shared_ffn_hidden_size": 7,
    },
    "deepseek-v3": {
        "rules": Rules(top_k=3, score="sigmoid", scaling=2.5, groups=2, top_groups=2, **LOSSES),
        "shared_ffn_hidden_size": 7,
        "bias_speed": 0.01,
    },
    "qwen2-moe": {
        "rules": Rules(top_k=2, renormalise=False, **LOSSES),
        "shared_ffn_hidden_size": 7,
        "shared_gate": True,
    },
}


def layer(variant, target=None):
    """A layer with values that are far from those of initialisation."""
    mixture = Mixture(num_experts=EXPERTS, ffn_hidden_size=FFN, **VARIANTS[variant])
    made = MoE(HIDDEN, mixture, init_std=0.5, residual_std=0.5, target=target)
    initialise(made, seed=3)
    if made.router.bias is not None:
        made.router.bias.set_data(Tensor(0.3 * RNG.standard_normal(EXPERTS).astype(np.float32)))
    return made


def mlp(x, gate, up, down):
    inner = gate @ x
    return down @ (inner / (1 + np.exp(-inner)) * (up @ x))


def reference(values, variant, x):
    """(y, aux) of x [B, T, H], token by token."""
    rules = VARIANTS[variant]["rules"]
    logits = x @ values["router.weight"].T
    choice = choose(logits, values.get("router.bias"), rules)
    weights, aux = weigh(logits, choice, rules)
    y = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        for expert, weight in zip(choice.kept[place], weights[place]):
            if expert >= 0:
                parts = (values[f"experts.{name}_proj"][expert] for name in ("gate", "up", "down"))
                y[place] += weight * mlp(x[place], *parts)
        if "shared.gate_proj.weight" in values:
            parts = (values[f"shared.{name}_proj.weight"] for name in ("gate", "up", "down"))
            factor = 1.0
            if "shared_gate.weight" in values:
                factor = 1 / (1 + np.exp(-values["shared_gate.weight"][0] @ x[place]))
            y[place] += factor * mlp(x[place], *parts)
    return y, aux


def finite_differences(scalar, value, flat_indices, step=1e-6):
    """Derivatives with respect to some elements of an array that the scalar is computed of."""
    gradient = np.zeros(len(flat_indices))
    for number, index in enumerate(zip(*np.unravel_index(flat_indices, value.shape))):
        kept = value[index]
        value[index] = kept + step
        above = scalar()
        value[index] = kept - step
        gradient[number] = (above - scalar()) / (2 * step)
        value[index] = kept
    return gradient


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_computes_what_its_experts_compute_token_by_token(variant):
    made = layer(variant)
    x = RNG.standard_normal((BATCH, LENGTH, HIDDEN))
    upstream, for_aux = RNG.standard_normal(x.shape), RNG.standard_normal(BATCH)
    leaf = Tensor(x.astype(np.float32))
    leaf.requires_grad_(True)
    with _compat.tape():
        y, aux = made(leaf)
    _compat.backward((y, aux), tuple(Tensor(g.astype(np.float32)) for g in (upstream, for_aux)))
    parameters = dict(made.parameters_and_names())
    values = {name: p.asnumpy().astype(np.float64) for name, p in parameters.items()}
    x = leaf.asnumpy().astype(np.float64)
    expected_y, expected_aux = reference(values, variant, x)
    np.testing.assert_allclose(y.asnumpy(), expected_y, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(aux.asnumpy(), expected_aux, rtol=1e-5)

    def scalar():
        got_y, got_aux = reference(values, variant, x)
        return (got_y * upstream).sum() + (got_aux * for_aux).sum()

    gradients = {name: p._grad for name, p in parameters.items() if p.requires_grad}
    assert parameters.keys() - gradients.keys() <= {"router.bias"}
    for name, gradient in {**gradients, "x": leaf._grad}.items():
        value, found = x if name == "x" else values[name], gradient.asnumpy()
        some = RNG.permutation(value.size)[:40]
        expected = finite_differences(scalar, value, some)
        scale = np.abs(found).max()
        np.testing.assert_allclose(found.reshape(-1)[some], expected, atol=2e-5 * scale, err_msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_portable_kernels_compute_the_same(variant):
    x = Tensor(RNG.standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32))
    native, portable = layer(variant), layer(variant, "CPU-portable")
    for name, parameter in portable.parameters_and_names():
        parameter.set_data(dict(native.parameters_and_names())[name])
    for mine, theirs in zip(native(x), portable(x), strict=True):
        np.testing.assert_allclose(theirs.asnumpy(), mine.asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operators_of_devices_decide_and_compute_the_same(variant):
    """Routing, sorting and products as on a GPU, run here: results, every gradient, loads."""
    x = RNG.standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32)
    host, device = layer(variant), layer(variant, "GPU")
    assert device.router.route is not None and host.router.route is None
    for name, param in device.parameters_and_names():
        param.set_data(Tensor(dict(host.parameters_and_names())[name].asnumpy()))
    found = []
    for made in (host, device):
        params = dict(made.parameters_and_names())
        leaf = _compat.leaf(Tensor(x), requires_grad=True)
        with _compat.tape():
            y, aux = made(leaf)
        ids = made.router(leaf).ids.asnumpy()
        _compat.backward((y, aux), (Tensor(np.cos(x)), Tensor(np.array([0.5, -2.0], np.float32))))
        trained = {name: param._grad.asnumpy() for name, param in params.items() if param.requires_grad}
        values = {"y": y.asnumpy(), "aux": aux.asnumpy(), "x": leaf._grad.asnumpy(), **trained}
        copies = {name: value.copy() for name, value in values.items()}
        found.append([ids.tolist(), made.router.take_loads().tolist(), copies])
    assert found[0][:2] == found[1][:2]
    assert sum(found[0][1]) == (BATCH * LENGTH * 3 if variant == "deepseek-v3" else 0)  # only with a bias
    for name, value in found[0][2].items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[1][2][name], value, rtol=2e-5, atol=2e-5 * scale, err_msg=name)


def test_an_expert_that_no_token_chose_has_a_gradient_of_zero():
    made = layer("mixtral")
    router = np.zeros((EXPERTS, HIDDEN), np.float32)
    router[1], router[3] = 1.0, 0.5
    made.router.weight.set_data(Tensor(router))
    x = Tensor(np.abs(RNG.standard_normal((1, 3, HIDDEN))).astype(np.float32))
    with _compat.tape():
        y = made(x)[0].sum()
    _compat.backward(y)
    for name in ("gate_proj", "up_proj", "down_proj"):
        gradient = getattr(made.experts, name)._grad.asnumpy()
        assert not gradient[[0, 2]].any() and gradient[1].any() and gradient[3].any()


def test_a_wrong_mixture_is_refused():
    with pytest.raises(UserError, match="5 experts a token, expected 1 to 4"):
        Mixture(num_experts=4, ffn_hidden_size=8, rules=Rules(top_k=5))
    with pytest.raises(UserError, match="nothing to gate"):
        Mixture(num_experts=4, ffn_hidden_size=8, rules=Rules(top_k=1), shared_gate=True)


# Whole models

LATENT = LatentConfig(q_rank=7, kv_rank=9, nope_head_dim=6, rope_head_dim=4, value_head_dim=5)


def decoder(**changes):
    options = {
        "vocab_size": 31, "hidden_size": 12, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2,
        "head_dim": 6, "max_seq_len": 16, "ffn_hidden_size": 20,
        "mixture": Mixture(num_experts=4, ffn_hidden_size=8, rules=Rules(top_k=2, **LOSSES)),
    }  # fmt: skip
    model = MoEDecoder(**{**options, **changes})
    initialise(model, seed=1)
    return model


def ids(batch=2, length=9):
    return Tensor(np.random.default_rng(2).integers(0, 31, (batch, length)).astype(np.int32))


def gradients(model, input_ids):
    """Loss with the auxiliary one, and gradients by name."""
    trained = {name: p for name, p in model.parameters_and_names() if p.requires_grad}
    _compat.clear_grads(trained.values())
    with _compat.tape():
        logits, aux = model(input_ids)
        loss = kernels.CrossEntropySum()(logits.reshape(-1, 31), input_ids.reshape(-1)) + aux.sum()
    _compat.backward(loss)
    return loss.asnumpy(), {name: p._grad.asnumpy() for name, p in trained.items()}


def test_the_auxiliary_loss_is_the_sum_over_layers_and_apart_for_each_sequence():
    model, found = decoder(dense_layers=1), []
    for block in model.model.layers:
        if isinstance(block.mlp, MoE):
            block.mlp.router.register_forward_hook(lambda cell, args, out: found.append(out.aux.asnumpy()))
    aux = model(ids())[1].asnumpy()
    assert len(found) == 2 and aux.shape == (2,)
    np.testing.assert_allclose(aux, found[0] + found[1], rtol=1e-6)
    for row in range(2):
        assert model(ids()[row : row + 1])[1].asnumpy()[0] == aux[row]


@pytest.mark.parametrize("kind", ["full", "sqrt", "selective"])
def test_recompute_changes_no_bit_and_counts_no_token_twice(kind):
    mixture = Mixture(num_experts=4, ffn_hidden_size=8, rules=Rules(top_k=2, **LOSSES), bias_speed=0.1)
    model = decoder(mixture=mixture, latent=LATENT, dense_layers=1)
    loss, expected = gradients(model, ids())
    counted = take_loads(model)
    applied = apply_recompute(model, kind)
    again_loss, again = gradients(model, ids())
    applied.remove()
    assert again_loss.tobytes() == loss.tobytes()
    assert all(again[name].tobytes() == gradient.tobytes() for name, gradient in expected.items())
    recounted = take_loads(model)
    assert recounted.keys() == counted.keys() == {f"model.layers.{i}.mlp.router.bias" for i in (1, 2)}
    for name, load in counted.items():
        assert load.sum() == 2 * 9 * 2 and load.tolist() == recounted[name].tolist()


def test_loads_add_up_until_they_are_taken_and_evaluation_counts_nothing():
    mixture = Mixture(num_experts=4, ffn_hidden_size=8, rules=Rules(top_k=2), bias_speed=0.1)
    model = decoder(mixture=mixture)
    with _compat.no_grad():
        model(ids())
    assert not any(load.any() for load in take_loads(model).values())
    gradients(model, ids())
    gradients(model, ids())
    assert [load.sum() for load in take_loads(model).values()] == [2 * 2 * 9 * 2] * 3
    assert not any(load.any() for load in take_loads(model).values())


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_routers_and_what_rides_along_stay_fp32_under_a_policy(name):
    model = decoder(dense_layers=1, latent=LATENT)
    chosen = policy(name)
    wide = fp32_parameters(model)
    assert {path for path in wide if "router" in path} == {
        f"model.layers.{i}.mlp.router.weight" for i in (1, 2)
    }
    for path, parameter in model.parameters_and_names():
        if path not in wide:
            parameter.data = Tensor(parameter.asnumpy().astype(np.float16 if name == "fp16" else np.float32))
    seen = []
    block = model.model.layers[2]
    handle = autocast(model, chosen, "CPU")
    block.mlp.router.register_forward_hook(lambda cell, args, out: seen.append((args[0], out)))
    block.mlp.experts.register_forward_hook(lambda cell, args, out: seen.append(out))
    exact = []
    block.register_forward_hook(lambda cell, args, out: exact.append((args[1], out[1])))
    logits, aux = model(ids())
    (x, routing), rows = seen
    working = ms.float16 if name == "fp16" else ms.float32
    assert (routing.weights.dtype, routing.aux.dtype, rows.dtype) == (ms.float32, ms.float32, working)
    assert (x.dtype, logits.dtype, aux.dtype) == (ms.float32, ms.float32, ms.float32)
    ((before, after),) = exact
    assert (before + routing.aux).asnumpy().tobytes() == after.asnumpy().tobytes() == aux.asnumpy().tobytes()
    handle.remove()


def test_norms_biases_and_embeddings_do_not_decay():
    mixture = Mixture(num_experts=4, ffn_hidden_size=8, rules=Rules(top_k=2), bias_speed=0.1)
    model = decoder(mixture=mixture, latent=LATENT, dense_layers=1)
    kept = {name for name, _ in model.parameters_and_names()} - decay_names(model)
    assert all("norm" in name or "bias" in name or "embed" in name for name in kept)
    assert "model.layers.1.mlp.experts.gate_proj" in decay_names(model)


def naive_latent(values, x):
    """Latent attention of x [T, H] in float64, without padding or kernels."""
    def norm(v, weight):
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * weight

    length, rope, nope = len(x), LATENT.rope_head_dim, LATENT.nope_head_dim
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, rope, 2) / rope)

    def turn(v):
        first, second = v[:, : rope // 2], v[:, rope // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)

    q = norm(x @ values["q_a_proj.weight"].T, values["q_a_layernorm.weight"]) @ values["q_b_proj.weight"].T
    compressed = x @ values["kv_a_proj_with_mqa.weight"].T
    shared_key = turn(compressed[:, LATENT.kv_rank :])
    kv = norm(compressed[:, : LATENT.kv_rank], values["kv_a_layernorm.weight"]) @ values["kv_b_proj.weight"].T
    q, kv = q.reshape(length, 2, -1), kv.reshape(length, 2, -1)
    out = []
    for head in range(2):
        query = np.concatenate([q[:, head, :nope], turn(q[:, head, nope:])], 1)
        key = np.concatenate([kv[:, head, :nope], shared_key], 1)
        logits = np.where(np.tri(length, dtype=bool), query @ key.T / np.sqrt(nope + rope), -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out.append(weights / weights.sum(1, keepdims=True) @ kv[:, head, nope:])
    return np.concatenate(out, 1) @ values["o_proj.weight"].T


@pytest.mark.parametrize("target", ["CPU", "CPU-portable"])
def test_latent_attention_is_that_of_its_formulas(target):
    from ms_zero.models.rope import RotaryTables

    cell = LatentAttention(
        12, 2, **vars(LATENT), norm_eps=1e-5, init_std=0.5, residual_std=0.5, target=target
    )
    initialise(cell, seed=4)
    x = Tensor(RNG.standard_normal((2, 7, 12)).astype(np.float32))
    x.requires_grad_(True)
    upstream = RNG.standard_normal((2, 7, 12)).astype(np.float32)
    cos, sin = RotaryTables(LATENT.rope_head_dim, 16, theta=10000.0)(ids(2, 7))
    with _compat.tape():
        out = cell(x, cos, sin)
    _compat.backward((out,), (Tensor(upstream),))
    parameters = dict(cell.parameters_and_names())
    values = {name: p.asnumpy().astype(np.float64) for name, p in parameters.items()}
    values["x"] = x.asnumpy().astype(np.float64)
    for row in range(2):
        expected = naive_latent(values, values["x"][row])
        np.testing.assert_allclose(out.asnumpy()[row], expected, rtol=2e-5, atol=2e-5)

    def scalar():
        return sum((naive_latent(values, values["x"][row]) * upstream[row]).sum() for row in range(2))

    gradients = {**{name: p._grad.asnumpy() for name, p in parameters.items()}, "x": x._grad.asnumpy()}
    for name, gradient in gradients.items():
        some = RNG.permutation(gradient.size)[:40]
        expected = finite_differences(scalar, values[name], some)
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(gradient.reshape(-1)[some], expected, atol=5e-5 * scale, err_msg=name)

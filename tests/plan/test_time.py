"""The time model: causes add up, formulas hold, published results are met with one set of constants."""

import pytest

from ms_zero.errors import UserError
from ms_zero.hardware import load_device
from ms_zero.plan.efficiency import Efficiency
from ms_zero.plan.flops import shape_flops
from ms_zero.plan.layout import FP32, Layout
from ms_zero.plan.models import load_model
from ms_zero.plan.published import ASCEND_CLUSTER, ASCEND_ROWS, predict
from ms_zero.plan.time import TimeModel
from ms_zero.plan.update import update_bytes

DEVICE = load_device("ascend-910b")
LLAMA = load_model("llama2-7b")
BASE = Layout(seq_len=4096, microbatches=8)
PERFECT = Efficiency(
    matmul=1,
    expert_matmul=1,
    imbalance=1,
    attention=1,
    memory=1,
    dp_overlap=0,
    cp_overlap=0,
    offload_overlap=0,
    layer_seconds=0,
    step_seconds=0,
)


@pytest.fixture(scope="module")
def model():
    return TimeModel(LLAMA, DEVICE)


LAYOUTS = {
    "alone": BASE,
    "data": BASE.replace(dp_shard=8, zero_stage=1),
    "stage 2": BASE.replace(dp_shard=8, zero_stage=2),
    "stage 3": BASE.replace(dp_shard=8, zero_stage=3, recompute="full"),
    "hybrid": BASE.replace(dp_shard=8, dp_replicate=4, zero_stage=3),
    "tensor": BASE.replace(tp=4, sequence_parallel=True),
    "context": BASE.replace(cp=4),
    "pipeline": BASE.replace(pp=4, dp_shard=2, zero_stage=1),
    "zero bubble": BASE.replace(pp=4, schedule="zb-h1", recompute="every_k", recompute_every=2),
    "interleaved": BASE.replace(pp=4, schedule="interleaved", virtual_stages=2, recompute="selective"),
    "offload": BASE.replace(
        dp_shard=8, zero_stage=3, optimizer_offload=1.0, parameter_offload=True, activation_offload=True
    ),
    "nvme": BASE.replace(dp_shard=8, zero_stage=1, optimizer_offload=0.5, offload_to="nvme"),
    "all": BASE.replace(pp=2, tp=2, cp=2, dp_shard=2, dp_replicate=2, zero_stage=2, sequence_parallel=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_causes_add_up_to_the_step(model, layout):
    assert layout.violations(LLAMA) == []
    for report in (model.estimate(layout), model.simulate(layout)):
        causes = report.causes()
        assert sum(causes.values()) == pytest.approx(report.step, rel=1e-9)
        assert min(causes.values()) >= -1e-9
        assert report.step >= model.efficiency.step_seconds
        assert report.tokens_per_second == pytest.approx(layout.tokens_per_step / report.step)
        assert report.days(report.tokens_per_second * 86_400) == pytest.approx(1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_closed_form_is_close_to_the_events(model, layout):
    assert model.estimate(layout).step == pytest.approx(model.simulate(layout).step, rel=0.03)
    assert model.step_seconds(layout) == model.estimate(layout).step


def test_a_perfect_device_reaches_its_peak_on_large_products():
    report = TimeModel(LLAMA, DEVICE, efficiency=PERFECT).estimate(BASE)
    products = shape_flops(LLAMA, 4096)
    causal = shape_flops(LLAMA, 4096, causal=True)
    # Forward and both gradients of all products; attention 2.5 times in backward, the masked half left out.
    flops = 3 * (products.projections + products.mlp + products.head) + 3.5 * causal.attention
    least = flops * BASE.tokens_per_step / DEVICE.peak_flops["bf16"]
    assert least < report.compute < 1.15 * least  # vector operations are the rest


def test_full_recompute_adds_a_forward_of_the_layers(model):
    plain, full = (model.estimate(BASE.replace(recompute=kind)) for kind in ("none", "full"))
    assert full.compute == plain.compute
    assert 0.27 < full.recompute / plain.compute < 0.36
    half = model.estimate(BASE.replace(recompute="every_k", recompute_every=2))
    assert half.recompute == pytest.approx(full.recompute / 2)
    assert full.hardware_flops_per_device > full.flops_per_device


def test_a_budget_recomputes_as_much_as_it_must(model):
    none, full = (model.estimate(BASE.replace(recompute=kind)) for kind in ("none", "full"))
    steps = []
    for gigabytes in (200, 15, 8):
        layout = BASE.replace(recompute="budget", recompute_budget=gigabytes * 1e9)
        steps.append(model.estimate(layout).recompute)
    assert steps[0] == none.recompute == 0
    assert steps == sorted(steps)
    assert 0 < steps[1] < steps[-1] <= full.recompute


def test_the_optimizer_streams_its_bytes(model):
    parameters = 6_738_415_616
    rate = DEVICE.memory_bandwidth * model.efficiency.memory
    whole = parameters * update_bytes(BASE.precision).total / rate
    assert model.estimate(BASE).optimizer == pytest.approx(whole)
    for stage in (1, 2, 3):
        sharded = model.estimate(BASE.replace(dp_shard=8, zero_stage=stage))
        assert sharded.optimizer == pytest.approx(whole / 8)
    assert model.estimate(BASE.replace(dp_shard=8)).optimizer == pytest.approx(whole)


def test_offloaded_states_travel_both_ways(model):
    layout = BASE.replace(dp_shard=8, zero_stage=1, optimizer_offload=1.0)
    seconds = 2 * 12 * 6_738_415_616 / 8 / DEVICE.host_bandwidth
    assert model.estimate(layout).offload == pytest.approx(seconds)
    nvme = model.estimate(layout.replace(offload_to="nvme"))
    assert nvme.offload == pytest.approx(seconds * DEVICE.host_bandwidth / DEVICE.nvme_bandwidth)


def test_stages_cost_what_they_send(model):
    quick = {
        stage: model.estimate(BASE.replace(dp_shard=64, zero_stage=stage)).exposed["dp"] for stage in range(4)
    }
    # Stage 0 gathers fp32 gradients again, stage 1 16-bit weights.
    assert quick[1] < quick[0] < 2.5 * quick[1]
    assert quick[1] < quick[2] < quick[3]
    kept = model.estimate(BASE.replace(dp_shard=64, zero_stage=3, reshard_after_forward=False))
    assert kept.exposed["dp"] <= quick[3]


def test_nothing_is_exchanged_alone(model):
    report = model.estimate(BASE)
    assert set(report.exposed.values()) == {0.0}
    assert report.bubble == report.offload == 0.0


def test_experts_make_all_to_all_traffic():
    mixtral = TimeModel(load_model("mixtral-8x7b"), DEVICE)
    layout = Layout(seq_len=4096, dp_shard=8, zero_stage=1)
    assert mixtral.estimate(layout).exposed["ep"] == 0.0
    assert mixtral.estimate(layout.replace(ep=8)).exposed["ep"] > 0.0


def test_a_device_without_the_figures_is_refused():
    with pytest.raises(UserError, match="no peak rate is known for fp32"):
        TimeModel(LLAMA, DEVICE, "fp32")
    a100 = TimeModel(LLAMA, load_device("nvidia-a100-sxm-80gb"), "fp32")
    slow = a100.estimate(BASE.replace(precision=FP32))
    assert slow.step > 5 * TimeModel(LLAMA, a100.device).estimate(BASE).step


def test_published_ascend_results_are_met_with_one_set_of_constants():
    errors = {row.name: predict(row).error for row in ASCEND_ROWS}
    assert sum(abs(error) <= 0.25 for error in errors.values()) >= 4, errors
    assert load_device(ASCEND_CLUSTER).peak_flops["bf16"] == 3.54e14


@pytest.mark.parametrize(
    ("name", "degrees", "batch", "teraflops"),
    [
        ("1.7b", (1, 1, 32), 512, 137),
        ("7.5b", (4, 1, 32), 512, 142),
        ("39.1b", (8, 2, 32), 1536, 138),
        ("145.6b", (8, 8, 24), 2304, 148),
        ("529.6b", (8, 35, 9), 2520, 163),
    ],
)
def test_megatrons_a100_results_are_near_with_the_same_constants(name, degrees, batch, teraflops):
    tp, pp, dp = degrees
    shape = load_model(f"megatron-{name}")
    model = TimeModel(shape, load_device("nvidia-a100-sxm-80gb"))
    best = 0.0
    for micro in (1, 2, 4, 8):
        for virtual in (1, 3, 4):
            layout = Layout(
                seq_len=2048,
                tp=tp,
                pp=pp,
                dp_replicate=dp,
                micro_batch_size=micro,
                microbatches=batch // dp // micro,
                recompute="full",
                flash_attention=False,
                schedule="interleaved" if virtual > 1 else "1f1b",
                virtual_stages=virtual,
            )
            if batch % (dp * micro) == 0 and not layout.violations(shape):
                best = max(best, model.estimate(layout).hardware_flops_per_device / 1e12)
    assert best == pytest.approx(teraflops, rel=0.25)

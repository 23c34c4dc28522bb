"""Properties of the memory model; its figures are held against tables and the engine elsewhere."""

import random
from dataclasses import replace

import pytest

from ms_zero.errors import UserError
from ms_zero.plan.activations import kernels_of, layer_activations
from ms_zero.plan.layout import MIXED, Layout
from ms_zero.plan.memory import Calibration, MemoryModel, explain_shortage, require_valid, state_bytes
from ms_zero.plan.models import load_model
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.report import PARTS

SHAPES = {name: load_model(name) for name in ("gpt3-175b", "llama-70b", "mixtral-8x7b", "deepseek-v3")}
MODELS = {name: MemoryModel(shape) for name, shape in SHAPES.items()}
GB = 1e9


def random_layout(rng, shape):
    """A valid layout with room to double every degree."""
    while True:
        pp = rng.choice((1, 2, 4))
        layout = Layout(
            seq_len=rng.choice((1024, 2048)),
            pp=pp,
            tp=rng.choice((1, 2, 4)),
            cp=rng.choice((1, 2)),
            ep=rng.choice((1, 2)) if shape.is_moe else 1,
            dp_replicate=rng.choice((1, 2)),
            dp_shard=rng.choice((2, 4, 8)),
            zero_stage=rng.choice((0, 1, 2, 3)),
            micro_batch_size=rng.choice((1, 2, 4)),
            microbatches=rng.choice((8, 16, 64)),
            schedule=rng.choice(("gpipe", "1f1b", "zb-h1")),
            recompute=rng.choice(("none", "selective", "every_k", "sqrt", "full")),
            recompute_every=rng.choice((1, 2, 3)),
            sequence_parallel=rng.random() < 0.5,
            flash_attention=rng.random() < 0.7,
        )
        if rng.random() < 0.3 and pp > 1:
            layout = layout.replace(schedule="interleaved", virtual_stages=2)
        if not layout.violations(shape):
            return layout


@pytest.mark.parametrize("name", SHAPES)
def test_memory_never_rises_with_more_sharding(name):
    rng, model, shape = random.Random(3), MODELS[name], SHAPES[name]
    for _ in range(150):
        layout = random_layout(rng, shape)
        base = model.peak(layout)
        more = [
            {"dp_shard": 2 * layout.dp_shard},
            {"tp": 2 * layout.tp},
            {"cp": 2 * layout.cp},
            {"sequence_parallel": True},
            {"flash_attention": True},
        ]
        if layout.virtual_stages == 1 and layout.schedule == "1f1b":
            more.append({"pp": 2 * layout.pp})
        if shape.is_moe and layout.expert_shard_degree % 2 == 0:
            more.append({"ep": 2 * layout.ep})
        for change in more:
            changed = layout.replace(**change)
            # A second context rank adds the buffers of its ring, a second stage those of its messages.
            if not changed.violations(shape):
                assert model.peak(changed) <= base * 1.005 + 0.2 * GB * ("pp" in change), (layout, change)


@pytest.mark.parametrize("name", SHAPES)
def test_memory_never_rises_with_the_zero_stage(name):
    rng, model, shape = random.Random(4), MODELS[name], SHAPES[name]
    for _ in range(60):
        layout = random_layout(rng, shape).replace(dp_shard=16, precision=MIXED)
        peaks = [model.peak(layout.replace(zero_stage=stage)) for stage in (0, 1, 2, 3)]
        assert peaks[0] >= peaks[1]
        # Stage 3 gathers units: where a device has a few layers only, that can be more than it shards away.
        if layout.pp * layout.virtual_stages == 1:
            assert peaks[1] >= peaks[2] >= peaks[3]


@pytest.mark.parametrize("name", SHAPES)
def test_memory_rises_with_what_is_computed_at_a_time(name):
    rng, model, shape = random.Random(5), MODELS[name], SHAPES[name]
    for _ in range(60):
        layout = random_layout(rng, shape).replace(schedule="1f1b", virtual_stages=1)
        base = model.peak(layout)
        assert model.peak(layout.replace(micro_batch_size=2 * layout.micro_batch_size)) > base
        assert model.peak(layout.replace(microbatches=2 * layout.microbatches)) >= base
        assert model.peak(layout.replace(schedule="gpipe")) >= base
        kinds = [model.peak(layout.replace(recompute=kind)) for kind in ("none", "selective", "full")]
        # What a layer rebuilds is held as well: with one layer in flight that is no gain.
        assert kinds[0] >= kinds[1] or layout.flash_attention
        if layout.pp > 1:
            assert kinds[0] >= kinds[2]


@pytest.mark.parametrize("name", SHAPES)
def test_the_quick_peak_is_that_of_the_full_report(name):
    rng, model = random.Random(6), MODELS[name]
    for _ in range(100):
        layout = random_layout(rng, SHAPES[name])
        report = model.report(layout)
        assert model.peak(layout) == report.peak
        assert len(report.stages) == layout.pp
        for stage in report.stages:
            assert set(stage.parts) <= set(PARTS)
            assert all(size > 0 for size in stage.parts.values())
            assert 0 < stage.low < stage.peak == sum(stage.parts.values())


@pytest.mark.parametrize("name", SHAPES)
def test_stages_hold_every_parameter_once(name):
    shape, model = SHAPES[name], MODELS[name]
    for pp, virtual in ((1, 1), (2, 1), (4, 2), (8, 2)):
        schedule = "interleaved" if virtual > 1 else "1f1b"
        layout = Layout(seq_len=1024, pp=pp, virtual_stages=virtual, schedule=schedule, microbatches=pp)
        held = sum(stage.parameters for stage in model.report(layout).stages)
        copies = shape.vocab_size * shape.hidden_size if shape.tie_embeddings and pp > 1 else 0
        assert held == count_parameters(shape) + copies


def test_the_last_stage_is_limited_by_logits():
    model = MemoryModel(load_model("llama3-8b"))
    layout = Layout(seq_len=8192, pp=4, dp_shard=2, micro_batch_size=4, microbatches=4, recompute="full")
    report = model.report(layout)
    last = report.stages[-1]
    assert (report.worst, last.largest()) == (last, "logits")
    assert all("logits" not in stage.parts for stage in report.stages[:-1])
    text = explain_shortage(report, last.peak - 3.1e9)
    assert text.startswith("out of memory by 3.1 GB in stage 3: logits take ")
    assert explain_shortage(report, last.peak) == ""


def test_peak_is_not_the_sum():
    """Logits are free again before the first layers are rebuilt."""
    model = MemoryModel(load_model("llama3-8b"))
    parts = model.report(Layout(seq_len=8192, dp_shard=8, recompute="full")).worst.parts
    assert ("logits" in parts) + ("transient" in parts) == 1


def test_offload_moves_states_to_the_host():
    model = MODELS["llama-70b"]
    layout = Layout(seq_len=4096, dp_shard=64, zero_stage=3)
    here = model.report(layout).worst
    there = model.report(layout.replace(optimizer_offload=1.0)).worst
    assert {"master", "moments"} <= set(here.parts)
    assert there.host == {name: here.parts[name] for name in ("master", "moments")}
    assert there.peak == pytest.approx(here.peak - sum(there.host.values()))
    half = model.report(layout.replace(optimizer_offload=0.5)).worst
    assert half.host["moments"] == half.parts["moments"] == here.parts["moments"] / 2
    disk = model.report(layout.replace(optimizer_offload=1.0, offload_to="nvme")).worst
    assert (disk.peak, disk.host) == (there.peak, {})
    weights = model.report(layout.replace(parameter_offload=True)).worst
    assert weights.host["weights"] == here.parts["weights"] and "weights" not in weights.parts
    active = model.report(layout.replace(activation_offload=True)).worst
    assert active.host["activations"] == here.parts["activations"] > active.parts["activations"]


def test_whole_gradients_are_kept_until_they_are_reduced():
    for stage in (2, 3):
        layout = Layout(seq_len=1, dp_shard=8, zero_stage=stage, microbatches=4)
        whole, _ = state_bytes(layout.replace(sync_each_microbatch=False), 1e9)
        shard, _ = state_bytes(layout, 1e9)
        assert whole["gradients"] == 8 * shard["gradients"] == 2e9


def test_gradients_of_a_single_microbatch_are_reduced_as_they_appear():
    for stage in (0, 1):
        for count, ranks in ((1, 4), (2, 1)):  # whole where several microbatches are added up
            layout = Layout(seq_len=1, dp_shard=4, zero_stage=stage, microbatches=count)
            assert state_bytes(layout, 1e9)[0]["gradients"] == MIXED.gradient * 1e9 / ranks


def test_replicas_do_not_shard():
    one, _ = state_bytes(Layout(seq_len=1, dp_shard=4, zero_stage=3), 1e9)
    two, _ = state_bytes(Layout(seq_len=1, dp_shard=4, dp_replicate=2, zero_stage=3), 1e9)
    assert one == two


def test_experts_are_sharded_over_the_ranks_that_repeat_them():
    layout = Layout(seq_len=1, dp_shard=8, ep=4, zero_stage=3)
    device, _ = state_bytes(layout, 0, 1e9)
    assert device["weights"] == 2e9 / 2


def test_mindformers_optimizer_parallel_shards_weights_and_keeps_the_gathered():
    model, layout = MODELS["llama-70b"], Layout(seq_len=4096, dp_shard=8, hsdp_level=1, microbatches=4)
    parts = {level: model.report(layout.replace(hsdp_level=level)).worst.parts for level in (1, 2, 3)}
    whole = 2 * count_parameters(SHAPES["llama-70b"])
    assert parts[1]["weights"] == whole / 8 and parts[1]["gradients"] == whole
    assert parts[1]["unsharded"] >= whole
    assert parts[2]["gradients"] == whole / 8 and parts[2]["unsharded"] >= whole
    assert parts[3]["unsharded"] < whole / 10


def test_a_budget_is_kept():
    model = MODELS["llama-70b"]
    layout = Layout(seq_len=4096, dp_shard=64, zero_stage=3)
    none, full = (model.report(layout.replace(recompute=kind)).worst for kind in ("none", "full"))
    budget = none.parts["activations"] / 2
    within = model.report(layout.replace(recompute="budget", recompute_budget=budget)).worst
    assert full.parts["activations"] < within.parts["activations"] <= budget
    with pytest.raises(UserError, match="below the least possible"):
        model.peak(layout.replace(recompute="budget", recompute_budget=1e6))


def test_the_longest_sequence_fits_and_the_next_does_not():
    model = MODELS["llama-70b"]
    layout = Layout(seq_len=4096, tp=8, pp=4, dp_shard=2, zero_stage=1, microbatches=8, recompute="full")
    capacity = model.peak(layout.replace(seq_len=2048))
    longest = model.largest_seq_len(layout, capacity)
    assert 2048 - 2 * 128 * 8 < longest <= 2048
    assert model.fits(layout.replace(seq_len=longest), capacity)
    assert not model.fits(layout.replace(seq_len=longest + 2 * 128 * 8), capacity)
    assert model.largest_seq_len(layout, 1e9) == 0


def test_calibration_scales_what_a_step_allocates():
    layout = Layout(seq_len=4096, dp_shard=64, zero_stage=3)
    plain = MODELS["llama-70b"].report(layout).worst.parts
    model = MemoryModel(SHAPES["llama-70b"], calibration=Calibration(dynamic_scale=1.5, reserve=7e9))
    scaled = model.report(layout).worst.parts
    assert scaled["activations"] == 1.5 * plain["activations"]
    assert scaled["weights"] == plain["weights"]
    assert scaled["reserve"] > 7e9


def test_kernels_of_devices():
    assert kernels_of("Ascend", 2) == ("ascend", True)
    assert kernels_of("Ascend", 4) == kernels_of("GPU", 2) == ("portable", False)


def test_composed_kernels_keep_more():
    shape = SHAPES["llama-70b"]
    layer, layout = shape.blocks[0][1], Layout(seq_len=4096)
    fused = layer_activations(shape, layer, layout, "ascend")
    plain = layer_activations(shape, layer, layout.replace(flash_attention=False), "ascend")
    composed = layer_activations(shape, layer, layout, "portable")
    assert composed.none > 1.5 * fused.none
    for stored in (plain, composed):
        assert stored.none - stored.selective >= 4096 * 64 * 4096 * 2
    again = layer_activations(shape, layer, layout, "mindformers")
    assert (again.none, again.full) == (fused.none, fused.full)
    assert fused.selective - again.selective == 4096 * 2 * (2 * 8192 + 28672)


def test_latent_attention_and_experts_are_counted():
    shape = SHAPES["deepseek-v3"]
    layout = Layout(seq_len=4096)
    dense, moe = (layer_activations(shape, layer, layout, "ascend") for _, layer in shape.blocks)
    heads = 128 * (192 + 192 + 128 + 128) + 2 * (1536 + 512) + 64
    numbers = 2 + 128 * 2 * 8  # of the norms, and of flash attention
    assert dense.none == 4096 * (2 * (4 * 7168 + heads + 3 * 18432) + 4 * numbers)
    copies = 4 * 7168 + heads + 3 * (8 * 2048 + 2048) + 2 * 8 * 7168
    assert moe.none == 4096 * (2 * copies + 4 * (numbers + 2 * 256))
    busy = layer_activations(shape, shape.blocks[1][1], layout, "ascend", imbalance=1.5)
    assert busy.none - moe.none == 4096 * 2 * 0.5 * 8 * (2 * 7168 + 3 * 2048)


def test_ranks_beyond_the_key_value_heads_keep_one_head_each():
    shape = SHAPES["llama-70b"]  # 8 key-value heads
    layer = shape.blocks[0][1]
    kept = {
        tp: layer_activations(
            shape, layer, Layout(seq_len=4096, tp=tp, sequence_parallel=True), "ascend"
        ).none
        for tp in (8, 16)
    }
    extra = 4096 * 2 * 2 * 128 / 2  # 16 ranks hold keys and values of one head, not of half a head
    assert kept[16] == kept[8] / 2 + extra


def test_an_invalid_layout_is_refused_with_every_reason():
    with pytest.raises(UserError, match=r"llama-70b: tp 3 does not divide.*; seq_len 9000 exceeds"):
        require_valid(Layout(seq_len=9000, tp=3), SHAPES["llama-70b"])
    require_valid(Layout(seq_len=4096), SHAPES["llama-70b"])


def test_a_shared_shape_has_no_side_effects():
    layout = Layout(seq_len=4096, dp_shard=8)
    before = MODELS["llama-70b"].peak(layout)
    MODELS["llama-70b"].peak(replace(layout, tp=8))
    assert MODELS["llama-70b"].peak(layout) == before

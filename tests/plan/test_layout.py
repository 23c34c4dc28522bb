import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ms_zero.config import load_config
from ms_zero.hardware import load_device
from ms_zero.pipeline.schedule import Action, Schedule, build, held_after, peak_in_flight, write_csv
from ms_zero.plan.layout import FP32, MIXED, MIXED_FP32_GRADIENTS, Layout, in_flight, split_layers
from ms_zero.plan.memory import MemoryModel
from ms_zero.plan.models import load_model
from ms_zero.plan.run import layout_of, memory_model_of, stage_layers
from ms_zero.plan.shapes import from_config
from ms_zero.plan.time import TimeModel
from ms_zero.plan.traffic import step_bytes

RUN = """
include: [models/llama-tiny]
data: {seq_len: 64}
train: {steps: 1, micro_batch_size: 3, accumulation_steps: 5, output_dir: o}
"""


@pytest.mark.parametrize("chunks", range(1, 40))
@pytest.mark.parametrize("name", ["gpt3-175b", "llama3.1-8b", "deepseek-v3"])
def test_every_layer_is_placed_once_and_no_chunk_is_larger_than_need_be(name, chunks):
    shape = load_model(name)
    split = split_layers(shape, chunks)
    assert (len(split), sum(split)) == (chunks, shape.num_layers)
    held = TimeModel(shape, load_device("ascend-910b2")).parameters(chunked(shape, chunks))
    even = [len(part) for part in np.array_split(np.arange(shape.num_layers), chunks)]
    other = TimeModel(shape, load_device("ascend-910b2")).parameters(chunked(shape, chunks, tuple(even)))
    assert max(each.total for each in held) <= max(each.total for each in other)


def chunked(shape, chunks, counts=None):
    return Layout(seq_len=8, pp=chunks, chunk_layers=counts)


def test_equal_layers_are_shared_out_evenly_where_they_outweigh_the_ends():
    assert split_layers(load_model("gpt3-175b"), 8) == (12,) * 8
    assert split_layers(load_model("llama2-70b"), 16) == (5,) * 16
    assert split_layers(load_model("llama3.1-8b"), 4) == (7, 9, 9, 7)


def test_chunks_cover_all_layers_of_a_shape():
    shape = load_model("deepseek-v3")
    for pp in (1, 2, 3, 7, 16):
        start, found = 0, []
        for count in Layout(seq_len=1, pp=pp).layers_of_chunks(shape):
            for number, layer in shape.layers_between(start, start + count):
                found += [layer] * number
            start += count
        assert found == list(shape.layers())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 3), (4, 8), (7, 20)])
def test_in_flight_is_what_schedules_hold(name, p, m):
    closed = tuple(in_flight(name, p, rank, m, 1)[0] for rank in range(p))
    held = peak_in_flight(build(name, p, m), until="W")
    assert all(bound >= actual for bound, actual in zip(closed, held, strict=True))
    assert closed[0] == held[0]
    if name != "zb-h1":
        assert closed == held


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (3, 4, 3), (8, 2, 64)])
def test_in_flight_of_interleaved_stages_is_what_the_schedule_holds(p, v, m):
    schedule = build("interleaved", p, m, v)
    for rank in range(p):
        counts = in_flight("interleaved", p, rank, m, v)
        order = schedule.orders[rank]
        held = held_after(order)
        assert sum(counts) == max(held)
        peak = order[: held.index(max(held)) + 1]
        assert counts == tuple(chunk_held(peak, rank + p * chunk) for chunk in range(v))


def chunk_held(order, stage):
    mine = [action for action in order if action.stage == stage]
    assert all(isinstance(action, Action) for action in mine)
    return sum(1 if action.kind == "F" else -1 for action in mine)


def test_degrees_multiply():
    layout = Layout(seq_len=8, pp=2, tp=3, cp=5, ep=5, dp_replicate=7, dp_shard=11, microbatches=4)
    assert layout.devices == 2 * 3 * 5 * 7 * 11
    assert (layout.dp, layout.shard_degree, layout.expert_shard_degree) == (77, 55, 11)
    assert layout.replace(micro_batch_size=3).global_batch_size == 3 * 4 * 77
    assert layout.tokens_per_step == 8 * layout.global_batch_size


def test_when_gradients_are_synchronised():
    stages = [Layout(seq_len=1, zero_stage=stage).syncs for stage in range(4)]
    assert stages == [False, False, True, True]
    assert Layout(seq_len=1, zero_stage=1, sync_each_microbatch=True).syncs
    assert not Layout(seq_len=1, zero_stage=3, sync_each_microbatch=False).syncs
    assert [Layout(seq_len=1, hsdp_level=level).syncs for level in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 3}, "tp 3 does not divide 64 attention heads"),
        ({"tp": 64}, None),
        ({"pp": 81}, "81 model chunks exceed the 80 layers"),
        ({"pp": 0}, "pp 0 is below 1"),
        ({"cp": 3, "seq_len": 4096}, "2 x cp = 6 does not divide seq_len 4096"),
        ({"ep": 2, "dp_shard": 2}, "ep 2 does not divide 0 experts"),
        ({"ep": 3, "dp_shard": 2}, "ep 3 does not divide dp_shard x cp = 2"),
        ({"seq_len": 8192}, "seq_len 8192 exceeds the model's max_seq_len 4096"),
        ({"schedule": "dualpipe", "pp": 2}, "'dualpipe' is not known"),
        ({"schedule": "interleaved", "pp": 4, "virtual_stages": 2, "microbatches": 6}, "not a multiple of 4"),
        ({"schedule": "interleaved", "pp": 4, "microbatches": 8}, "at least 2 virtual stages"),
        ({"virtual_stages": 2}, "virtual stages need pp above 1"),
        ({"recompute": "some"}, "recompute some is not one of"),
        ({"pp": 2, "chunk_layers": (40, 41)}, "add up to the 80 blocks of the model, got 2 with a sum of 81"),
        ({"pp": 2, "chunk_layers": (80,)}, "expected 2 numbers of at least 0"),
        ({"pp": 2, "chunk_layers": (39, 41)}, None),
        ({"tp": 32, "seq_len": 1000, "sequence_parallel": True}, "tp 32 does not divide the 1000 tokens"),
        ({"microbatches": 0}, "microbatches and seq_len must be at least 1"),
    ],
)
def test_impossible_layouts_say_why(changes, reason):
    found = Layout(**{"seq_len": 4096, **changes}).violations(load_model("llama2-70b"))
    assert found == [] if reason is None else any(reason in each for each in found), found


def test_precisions_have_the_published_bytes():
    assert [p.bytes_per_parameter for p in (MIXED, MIXED_FP32_GRADIENTS, FP32)] == [16, 18, 16]


def test_a_run_file_becomes_its_layout(tmp_path):
    path = tmp_path / "run.yaml"
    parallel = "parallel: {zero_stage: 2, dp_replicate: 2, bucket_mb: 3}"
    path.write_text(f"{RUN}{parallel}\nprecision: {{policy: bf16}}\n")
    config = load_config(path, world_size=8).config
    layout = layout_of(config)
    assert (layout.dp_replicate, layout.dp_shard, layout.devices) == (2, 4, 8)
    assert (layout.micro_batch_size, layout.microbatches, layout.seq_len) == (3, 5, 64)
    assert (layout.zero_stage, layout.syncs, layout.bucket_bytes) == (2, True, 3 * 2**20)
    # A CPU computes bf16 in fp32; the rest is what the policy says.
    assert layout.precision == replace(MIXED_FP32_GRADIENTS, activation=4, rounded=True)
    assert layout.flash_attention
    assert layout.global_batch_size == config.train.global_batch_size
    assert memory_model_of(config, "run").report(layout).worst.parts["reserve"] < 1e8


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("memory: {recompute: every_k, recompute_every: 3}", {"recompute": "every_k", "recompute_every": 3}),
        ("memory: {recompute: budget, budget_gb: 2.5}", {"recompute": "budget", "recompute_budget": 2.5e9}),
        ("memory: {activations: int8_host}", {"activation_offload": True, "activation_bits": 8}),
        ("memory: {activations: host}", {"activation_offload": True, "activation_bits": None}),
        ("model: {dropout: 0.1}", {"dropout": True}),
        ("hardware: {kernels: portable}", {"flash_attention": False}),
        ("hardware: {target: GPU, device: nvidia-h100-sxm}", {"flash_attention": False}),
        ("parallel: {zero_stage: 3, prefetch: 2, reshard_after_forward: false}", {"prefetch": 2}),
        ("parallel: {zero_stage: 3, wrap: size, wrap_elements: 7}", {"unit_elements": 7}),
        ("parallel: {tp: 4, sequence_parallel: true}", {"tp": 4, "sequence_parallel": True}),
        ("parallel: {zero_stage: 3, reshard_after_forward: false}", {"reshard_after_forward": False}),
        ("parallel: {zero_stage: 2, sync_each_microbatch: false}", {"sync_each_microbatch": False}),
        ("offload: {optimizer: nvme, fraction: 0.5, nvme_path: x}", {"optimizer_offload": 0.5}),
        ("optim: {kind: sgd}", {"precision": replace(FP32, moments=0)}),
    ],
)
def test_what_a_run_file_says_reaches_the_layout(tmp_path, section, expected):
    path = tmp_path / "run.yaml"
    path.write_text(f"{RUN}{section}\n")
    layout = layout_of(load_config(path, world_size=None, to_run=False).config)
    assert {name: getattr(layout, name) for name in expected} == expected


PIPELINE = "parallel: {pp: 2, %s}\n"


def layers_of(tmp_path, parallel, more=""):
    path = tmp_path / "run.yaml"
    path.write_text(f"{RUN}{PIPELINE % parallel}{more}")
    config = load_config(path, world_size=None, to_run=False).config
    return layout_of(config).layers_of_chunks(from_config(config.model)), stage_layers(config, 2)


def test_the_planner_and_a_run_share_blocks_out_alike(tmp_path):
    assert layers_of(tmp_path, "stage_layers: [1, 3]") == ((1, 3), (1, 3))
    by_parameters = layers_of(tmp_path, "stage_balance: parameters")
    assert by_parameters[0] == by_parameters[1] and sum(by_parameters[0]) == 4
    wide = "model: {vocab_size: 100000, num_layers: 12}\n"
    assert layers_of(tmp_path, "stage_balance: parameters", wide) == ((6, 6), (6, 6))
    # Rows are read from an embedding, and the whole head is multiplied: by time the last stage has less.
    for hardware in ("", "hardware: {target: Ascend, device: ascend-910b2}\nprecision: {policy: bf16}\n"):
        planned, run = layers_of(tmp_path, "stage_balance: time", wide + hardware)
        assert planned == run and planned[0] > 6, hardware


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_a_schedule_of_ones_own_is_planned_like_the_published_one(name, virtual):
    shape, order = load_model("llama3.1-8b"), build(name, 4, 8, virtual)
    options = {"recompute": "full", "dp_shard": 2, "zero_stage": 2}
    known = Layout(seq_len=4096, pp=4, microbatches=8, schedule=name, virtual_stages=virtual, **options)
    own = known.replace(schedule="mine.csv", virtual_stages=1, order=order)
    assert own.violations(shape) == []
    memory, time = MemoryModel(shape), TimeModel(shape, load_device("ascend-910b2"))
    assert memory.report(own) == memory.report(known)
    for mine, theirs in ((time.estimate(own), time.simulate(known)), (time.simulate(own),) * 2):
        assert mine.causes() == pytest.approx(theirs.causes())
    assert step_bytes(shape, own, 1.0) == step_bytes(shape, known, 1.0)
    assert "is for 8 microbatches, the run has 4" in own.replace(microbatches=4).violations(shape)[0]


def test_a_schedule_may_turn_back_on_the_last_rank(tmp_path):
    # Two ranks, four stages, as a V: rank 0 has the first and the last one.
    actions = {rank: [] for rank in (0, 1)}
    for microbatch in range(2):
        for kind, stages in (("F", range(4)), ("B", reversed(range(4)))):
            for stage in stages:
                actions[(0, 1, 1, 0)[stage]].append(Action(kind, stage, microbatch))
    order = Schedule("v", 2, (0, 1, 1, 0), tuple(map(tuple, actions.values())))
    write_csv(order, tmp_path / "v.csv")
    more = "train: {steps: 1, micro_batch_size: 3, accumulation_steps: 2, output_dir: o}\n"
    path = tmp_path / "run.yaml"
    path.write_text(f"{RUN.split('train:')[0]}{more}{PIPELINE % f'schedule: {tmp_path}/v.csv'}")
    config = load_config(path, world_size=None, to_run=False).config
    layout, shape = layout_of(config), from_config(config.model)
    assert layout.chunks == 4 and [layout.rank_of(chunk) for chunk in range(4)] == [0, 1, 1, 0]
    first, last = memory_model_of(config, "run").report(layout).stages
    assert first.parameters > last.parameters and "logits" not in last.parts
    # forward 0 to 1 and 1 to 0, and back
    tokens = layout.micro_batch_size * layout.seq_len * layout.precision.activation
    assert step_bytes(shape, layout, 0.0)["pp"] == 2 * 2 * tokens * shape.hidden_size


def test_a_chunk_may_have_no_layers():
    shape = load_model("llama3.1-8b")
    layout = Layout(seq_len=4096, pp=3, microbatches=4, chunk_layers=(0, 32, 0), recompute="selective")
    assert layout.violations(shape) == []
    memory, time = MemoryModel(shape).report(layout), TimeModel(shape, load_device("ascend-910b2"))
    assert [stage.parts.get("activations", 0.0) > 0 for stage in memory.stages] == [False, True, False]
    assert time.simulate(layout).step > time.simulate(layout.replace(chunk_layers=None)).step


def test_weight_gradients_that_wait_take_memory():
    memory, base = MemoryModel(load_model("llama2-7b")), Layout(seq_len=4096, pp=4, microbatches=8)
    plain, waiting = base.replace(recompute="full"), base.replace(recompute="full", schedule="zb-h1")
    held = [[stage.parts["activations"] for stage in memory.report(each).stages] for each in (plain, waiting)]
    assert held[0][0] == held[1][0]  # the first rank computes them at once
    grown = [later - now for now, later in zip(*held, strict=True)]
    assert grown == sorted(grown) and grown[-1] > 2 * grown[1] > 0
    assert memory.peak(waiting) == max(stage.peak for stage in memory.report(waiting).stages)


def test_the_kernels_of_a_run_decide_what_is_kept(tmp_path):
    peaks = {}
    for kernels in ("native", "portable"):
        path = tmp_path / f"{kernels}.yaml"
        path.write_text(f"{RUN}hardware: {{kernels: {kernels}}}\n")
        config = load_config(path).config
        peaks[kernels] = memory_model_of(config, "run").peak(layout_of(config))
    assert peaks["portable"] > 1.2 * peaks["native"]


def test_an_offloaded_run_keeps_its_state_on_the_host(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN + "offload: {optimizer: cpu, fraction: 0.5}\noptim: {kind: adamw}\n")
    config = load_config(path, to_run=False).config
    worst = memory_model_of(config, "run").report(layout_of(config)).worst
    assert worst.parts["moments"] == worst.host["moments"]


def test_random_layouts_are_either_valid_or_explained():
    rng, shape = random.Random(7), load_model("mixtral-8x7b")
    seen = {True: 0, False: 0}
    for _ in range(300):
        degrees = {name: rng.choice((1, 2, 3, 4, 8)) for name in ("pp", "tp", "cp", "ep", "dp_shard")}
        layout = Layout(seq_len=rng.choice((4096, 1000)), microbatches=8, **degrees)
        found = layout.violations(shape)
        seen[not found] += 1
        assert all(isinstance(reason, str) and reason for reason in found)
    assert min(seen.values()) > 20


def test_all_degrees_of_gpt3_that_divide_are_valid():
    shape = load_model("gpt3-175b")
    for pp, tp, dp in product((1, 2, 8, 96), (1, 8, 96), (1, 5)):
        assert Layout(seq_len=2048, pp=pp, tp=tp, dp_shard=dp, microbatches=96).violations(shape) == []

"""Plans: what is chosen, why simpler layouts lose, what would make the impossible possible."""

import json

import pytest

from ms_zero.errors import UserError
from ms_zero.plan.explain import count_text, describe, explain_plan
from ms_zero.plan.layout import Layout
from ms_zero.plan.models import load_model
from ms_zero.plan.planner import (
    Request,
    capacity_of,
    default_batch,
    follows_rule,
    largest_seq_len,
    make_plan,
    rule_of_thumb,
)


def request(model, devices, seq_len, **options):
    return Request(model=model, cluster="ascend-910b", devices=devices, seq_len=seq_len, **options)


@pytest.fixture(scope="module")
def large():
    return make_plan(request("llama-70b", 256, 4096, tokens=2e12))


@pytest.fixture(scope="module")
def impossible():
    return make_plan(request("gpt3-175b", 8, 2048, offload=False))


def test_the_choice_is_as_fast_as_the_fastest_and_no_more_complex(large):
    fastest = large.found.best[0].time.step
    assert fastest <= large.choice.time.step <= 1.03 * fastest
    assert large.choice.layout.devices == 256
    assert large.memory.peak(large.choice.layout) <= large.capacity.device
    assert large.alternatives(3)[0] is large.choice


def test_the_answer_names_layouts_limits_and_why_simpler_ones_lose(large):
    text = "\n".join(explain_plan(large))
    assert f"recommended: {describe(large.choice.layout)}" in text
    assert "ZeRO-2" in text and "out of memory by" in text and "in stage 0: weights" in text
    assert "as fast within 3%" in text and "takes" in text
    assert "2 T tokens take" in text
    assert f"{large.choice.time.days(2e12):.1f} days" in text
    assert "rule of thumb: 7-70B" in text
    assert large.request.tokens / large.choice.time.tokens_per_second / 86400 == pytest.approx(
        large.choice.time.days(2e12)
    )


def test_what_is_slower_is_said_where_a_pipeline_wins():
    text = "\n".join(explain_plan(make_plan(request("gpt3-175b", 256, 2048, tokens=3e11))))
    assert "slower:" in text and "interleaved" in text and "zb-h1" not in text


def test_the_impossible_says_what_would_make_it_possible(impossible):
    assert impossible.choice is None
    text = "\n".join(explain_plan(impossible))
    assert "nothing fits" in text
    assert "closest: out of memory by" in text
    assert "devices" in text.split("enough: ")[1]
    assert "no shorter sequence is enough on 8 devices" in text
    assert impossible.alternatives(3) == []


def test_the_number_of_devices_that_is_enough_is_enough(impossible):
    (enough,) = (each for each in impossible.remedies if each.startswith("enough: "))
    devices = int(enough.split()[1])
    batch = 16 * devices
    fitting = make_plan(request("gpt3-175b", devices, 2048, offload=False, global_batch_size=batch))
    assert fitting.choice is not None
    fewer = make_plan(request("gpt3-175b", devices - 8, 2048, offload=False, global_batch_size=batch - 128))
    assert fewer.choice is None


def test_a_shorter_sequence_is_offered():
    plan = make_plan(request("llama3.1-8b", 4, 131072, offload=False, global_batch_size=4))
    assert plan.choice is None
    (longest,) = (each for each in plan.remedies if each.startswith("longest sequence"))
    length = int(longest.split()[5])
    again = make_plan(request("llama3.1-8b", 4, length, offload=False, global_batch_size=4))
    assert again.choice is not None


def test_offload_is_offered_where_it_is_enough():
    plan = make_plan(request("llama2-7b", 1, 2048, offload=False, global_batch_size=8))
    assert plan.choice is None
    assert any("with offload it fits" in remedy and "host memory" in remedy for remedy in plan.remedies)
    assert make_plan(request("llama2-7b", 1, 2048, global_batch_size=8)).choice is not None


def test_a_guessed_architecture_is_said(tmp_path):
    config = {"model_type": "new", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    text = "\n".join(explain_plan(make_plan(request(str(path), 1, 512))))
    assert "note: architecture new is not known and was read as Llama-like" in text


def test_small_models_stay_simple():
    plan = make_plan(request("gpt2-small", 1, 1024, global_batch_size=8))
    layout = plan.choice.layout
    assert (layout.pp, layout.tp, layout.dp, layout.recompute) == (1, 1, 1, "none")
    assert plan.simple == ()
    assert follows_rule(plan.shape, layout)


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ("gpt2-small", "single device"),
        ("llama3.2-3b", "ZeRO-2 or 3"),
        ("llama2-13b", "FSDP"),
        ("gpt3-175b", "tensor x pipeline x data"),
        ("megatron-529.6b", "beyond 400B"),
        ("mixtral-8x7b", "experts"),
    ],
)
def test_rules_of_thumb(model, rule):
    assert rule in rule_of_thumb(load_model(model))


def test_the_default_batch_divides_well():
    for devices in (1, 8, 24, 256, 1000, 100_000):
        batch = default_batch(70 * 10**9, 4096, devices, 8)
        odd = devices // (devices & -devices)
        assert batch % odd == 0
        assert batch >= devices / 16
    assert default_batch(70 * 10**9, 4096, 256, 8) * 4096 == 2**22
    assert default_batch(124 * 10**6, 1024, 8, 8) * 1024 == 2**19


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama-700b"}, "did you mean llama-70b"),
        ({"cluster": "ascend-910z"}, "did you mean ascend-910b"),
        ({"cluster": "cpu"}, "no peak rate is known for bf16"),
        ({"devices": 0}, "--devices 0"),
        ({"seq_len": 0}, "--seq 0"),
        ({"seq_len": 8192}, "llama-70b has 4096 positions"),
        ({"dtype": "int4"}, "expected one of bf16, fp16, fp32"),
        ({"global_batch_size": 0}, "--global-batch 0"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(changes, message):
    wanted = {"model": "llama-70b", "cluster": "ascend-910b", "devices": 8, "seq_len": 4096} | changes
    with pytest.raises(UserError, match=message) as caught:
        make_plan(Request(**wanted))
    assert "\n" not in str(caught.value)


def test_a_batch_that_nothing_divides_is_said_with_one_that_is_divided():
    plan = make_plan(request("gpt2-small", 4096, 1024, global_batch_size=1))
    assert plan.choice is None
    first, second = plan.remedies
    assert first == "no layout divides 4096 devices and a batch of 1"
    batch = int(second.split()[3])
    assert make_plan(request("gpt2-small", 4096, 1024, global_batch_size=batch)).choice is not None
    assert make_plan(request("gpt2-small", 4096, 1024, global_batch_size=batch // 2)).choice is None


def test_the_longest_sequence_is_found_between_halvings():
    plan = make_plan(request("llama3.1-8b", 4, 131072, offload=False, global_batch_size=4))
    length = largest_seq_len(plan)
    step = max(128, 2 ** (length.bit_length() - 1) // 8)
    longer = make_plan(request("llama3.1-8b", 4, length + step, offload=False, global_batch_size=4))
    assert longer.choice is None


def test_the_host_holds_no_more_than_helps():
    plan = make_plan(request("llama-70b", 512, 4096, global_batch_size=1024))
    layout = plan.choice.layout
    assert layout.activation_offload and not layout.optimizer_offload
    inside = make_plan(request("llama-70b", 512, 4096, global_batch_size=1024, offload=False))
    assert inside.choice.time.step > 1.03 * plan.found.best[0].time.step


def test_capacity_comes_from_the_catalogue(large):
    assert capacity_of(large.device).device == 65466039009
    assert capacity_of(large.device).host == pytest.approx(0.9 * 1e12 / 8)


def test_layouts_and_numbers_in_words():
    layout = Layout(
        seq_len=1, pp=4, tp=2, dp_shard=2, zero_stage=2, schedule="interleaved", virtual_stages=3,
        micro_batch_size=2, microbatches=8, recompute="every_k", recompute_every=2, optimizer_offload=0.5,
    )  # fmt: skip
    assert describe(layout) == (
        "pp 4, tp 2, dp_shard 2, ZeRO-2, interleaved x3, micro batch 2 x 8, recompute every_k 2, "
        "50% of the optimizer on cpu"
    )
    assert [count_text(n) for n in (68_976_648_192, 2e12, 4.19e6, 17)] == ["68.98 B", "2 T", "4.19 M", "17"]

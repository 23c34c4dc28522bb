"""Run files that the planner writes: accepted by our own config, or exact about what is not."""

import pytest

from ms_zero.config import check_config, load_config
from ms_zero.errors import UserError
from ms_zero.plan import runfile
from ms_zero.plan.layout import Layout
from ms_zero.plan.planner import Request, make_plan
from ms_zero.plan.run import layout_of
from ms_zero.plan.runfile import layout_keys, run_file, split_keys, write_run_file

# A setting that no version has a key for.
LATER = ("parallel.later", 4, 1)


def plan(model, devices, seq_len, **options):
    return make_plan(
        Request(model=model, cluster="ascend-910b", devices=devices, seq_len=seq_len, **options)
    )


@pytest.fixture(scope="module")
def simple():
    return plan("gpt2-small", 8, 1024, global_batch_size=64, tokens=1e9, offload=False)


@pytest.fixture(scope="module")
def parallel():
    return plan("gpt3-175b", 256, 2048, tokens=3e11)


def test_a_data_parallel_plan_is_accepted_as_it_is(simple, tmp_path):
    path = tmp_path / "run.yaml"
    assert write_run_file(simple, path) == []
    layout = simple.choice.layout
    config = load_config(path, world_size=8, to_run=True).config
    assert config.data.seq_len == 1024
    assert config.train.global_batch_size == layout.global_batch_size == 64
    assert config.train.micro_batch_size == layout.micro_batch_size
    assert config.train.accumulation_steps == layout.microbatches
    assert config.parallel.dp_shard == layout.dp_shard
    assert config.parallel.zero_stage == layout.zero_stage
    assert config.precision.policy == "bf16"
    assert config.hardware.device == "ascend-910b"
    assert config.train.steps == round(1e9 / layout.tokens_per_step)


def test_what_lint_refuses_has_been_said(parallel, tmp_path):
    path = tmp_path / "run.yaml"
    said = write_run_file(parallel, path)
    findings = [each for each in check_config(path, world_size=256).findings if each.severity != "warning"]
    assert [str(each) for each in findings if str(each) not in said] == []


def test_a_pipeline_is_written_with_its_schedule(parallel, tmp_path):
    path = tmp_path / "run.yaml"
    assert write_run_file(parallel, path) == []
    loaded = load_config(path, world_size=256)
    layout = parallel.choice.layout
    assert layout.pp > 1 and layout.tp > 1
    assert layout_of(loaded.config).replace(precision=layout.precision, sync_each_microbatch=None) == layout


@pytest.mark.parametrize("model", ["llama2-7b", "gpt3-13b", "llama-70b", "gpt3-175b"])
@pytest.mark.parametrize("devices", [8, 64, 512])
def test_what_is_recommended_is_accepted(model, devices, tmp_path):
    made = plan(model, devices, 2048)
    if made.choice is not None:
        assert write_run_file(made, tmp_path / "run.yaml") == []


def test_what_has_no_key_is_named():
    wanted = [*layout_keys(Layout(seq_len=8, ep=4, dp_shard=4), "bf16"), LATER, ("parallel.other", 1, 1)]
    known, missing = split_keys(wanted)
    assert missing == ["parallel.later: 4"]
    assert known["parallel"]["ep"] == 4 and known["precision"] == {"policy": "bf16"}


def test_what_has_no_key_is_named_in_the_file_too(parallel, monkeypatch):
    monkeypatch.setattr(runfile, "layout_keys", lambda *given: [*layout_keys(*given), LATER])
    written = run_file(parallel, "runs/x")
    assert "# not in this version: parallel.later: 4" in written.text


def test_the_batch_algebra_is_kept(parallel, tmp_path):
    path = tmp_path / "run.yaml"
    write_run_file(parallel, path)
    config = load_config(path, world_size=256, to_run=False).config
    layout = parallel.choice.layout
    assert config.train.global_batch_size == layout.global_batch_size
    assert config.train.micro_batch_size == layout.micro_batch_size
    assert config.train.accumulation_steps == layout.microbatches
    assert config.parallel.pp == layout.pp
    assert config.parallel.tp == layout.tp


def test_a_file_is_not_overwritten(simple, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        write_run_file(simple, path)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="cannot write the run file"):
        write_run_file(simple, tmp_path / "no" / "run.yaml")


def test_a_model_with_experts_is_written_with_its_degrees(tmp_path):
    mixture, path = plan("mixtral-8x7b", 64, 4096, tokens=1e12), tmp_path / "run.yaml"
    assert write_run_file(mixture, path) == []
    written, layout = layout_of(load_config(path, world_size=64).config), mixture.choice.layout
    degrees = ("pp", "tp", "cp", "ep", "dp_replicate", "dp_shard", "zero_stage")
    assert {name: getattr(written, name) for name in degrees} == {
        name: getattr(layout, name) for name in degrees
    }


def test_nothing_is_written_where_nothing_fits(tmp_path):
    with pytest.raises(UserError, match="no layout fits"):
        write_run_file(plan("gpt3-175b", 8, 2048, offload=False), tmp_path / "run.yaml")
    assert not (tmp_path / "run.yaml").exists()

import json

import pytest

from ms_zero.config import load_config, render_effective
from ms_zero.errors import UserError
from ms_zero.plan.calibrate import calibrate, read_run
from ms_zero.plan.memory import RESERVE
from ms_zero.plan.run import layout_of, memory_model_of

RUN = """
include: [models/gpt2-small]
data: {seq_len: 1024}
train: {steps: 9, micro_batch_size: %d, accumulation_steps: 1, output_dir: o}
precision: {policy: bf16}
hardware: {target: Ascend, device: ascend-910b2}
"""


def log(folder, micro, memory, **more):
    """A run's log whose steps used memory(estimate, its parts) bytes."""
    path = folder / f"run-{micro}.yaml"
    path.write_text(RUN % micro)
    loaded = load_config(path, world_size=1)
    model = memory_model_of(loaded.config, "run")
    worst = model.report(layout_of(loaded.config)).worst
    used = memory(worst)
    events = [
        {"event": "run", "config": render_effective(loaded), "world_size": 1},
        {"event": "message", "text": "hello"},
        *({"event": "step", "memory_bytes": used - 10 + n, **more} for n in range(11)),
    ]
    file = folder / f"metrics-{micro}.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(file)


def corrected_peak(calibration, run):
    model = memory_model_of(run.config, "run", calibration)
    return model.peak(layout_of(run.config))


def states(worst):
    return sum(worst.parts.get(name, 0) for name in ("weights", "gradients", "master", "moments"))


@pytest.mark.parametrize("factor", [0.3, 0.8, 0.95, 1.0, 1.3])
def test_after_one_run_the_estimate_is_its_measurement(tmp_path, factor):
    file = log(tmp_path, 4, lambda worst: states(worst) + factor * (worst.peak - states(worst)))
    run = read_run(file)
    calibration = calibrate([run])
    assert corrected_peak(calibration, run) == pytest.approx(run.memory_bytes, rel=1e-6)
    assert calibration.source == file


def test_more_than_estimated_is_a_factor_and_less_the_reserve(tmp_path):
    more = calibrate([read_run(log(tmp_path, 4, lambda worst: 1.2 * worst.peak))])
    assert more.dynamic_scale > 1 and more.reserve == pytest.approx(RESERVE)
    less = calibrate([read_run(log(tmp_path, 4, lambda worst: worst.peak - 1e9))])
    assert less.dynamic_scale == 1 and less.reserve == pytest.approx(RESERVE - 1e9, rel=1e-6)


def test_one_run_never_gives_a_large_factor(tmp_path):
    calibration = calibrate([read_run(log(tmp_path, 1, lambda worst: worst.peak + 20e9))])
    assert calibration.dynamic_scale == 1.5
    assert calibration.reserve > 10e9


def test_a_run_on_a_cpu_calibrates_cpus_only(tmp_path):
    file = log(tmp_path, 4, lambda worst: worst.peak + 1e9)
    path = tmp_path / "metrics-4.jsonl"
    text = path.read_text().replace("target: Ascend", "target: CPU")
    path.write_text(text.replace("device: ascend-910b2", "device: cpu"))
    run = read_run(file)
    calibration = calibrate([run])
    assert calibration.dynamic_scale == 1
    assert corrected_peak(calibration, run) == pytest.approx(run.memory_bytes, rel=1e-6)
    with pytest.raises(UserError, match=r"measured on CPU, which says nothing about Ascend; run there"):
        calibrate([run], "Ascend")


def test_two_runs_give_factor_and_reserve(tmp_path):
    def used(worst):
        return states(worst) + 1.25 * (worst.peak - states(worst) - RESERVE) + 2.5e9

    runs = [read_run(log(tmp_path, micro, used)) for micro in (1, 8, 32)]
    calibration = calibrate(runs)
    assert calibration.dynamic_scale == pytest.approx(1.25, rel=1e-6)
    assert calibration.reserve == pytest.approx(2.5e9, rel=1e-6)
    for run in runs:
        assert corrected_peak(calibration, run) == pytest.approx(run.memory_bytes, rel=1e-6)


def test_the_rate_is_that_of_the_second_half(tmp_path):
    file = log(tmp_path, 4, lambda worst: 1e10, tokens_per_second_per_device=5.0)
    lines = (tmp_path / "metrics-4.jsonl").read_text().splitlines()
    lines[2:5] = [line.replace("5.0", "1.0") for line in lines[2:5]]
    (tmp_path / "metrics-4.jsonl").write_text("\n".join(lines) + '\n{"event": "st')
    run = read_run(file)
    assert (run.tokens_per_second_per_device, run.steps, run.world_size) == (5.0, 11, 1)


def test_the_last_start_in_a_log_counts(tmp_path):
    first = (tmp_path / log(tmp_path, 4, lambda worst: 9e10)).read_text()
    file = tmp_path / log(tmp_path, 8, lambda worst: 1e10)
    file.write_text(first + file.read_text())
    run = read_run(file)
    assert (run.config.train.micro_batch_size, run.memory_bytes) == (8, 1e10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no event 'run'"),
        ('{"event": "step"}\n', "no event 'run'"),
        ("hello\nworld\n", ":1: not a JSON object"),
        ("[1]\n{}\n", ":1: not a JSON object"),
        ('{"event": "run", "config": "x: 1", "world_size": 1}\n', "the run has no step yet"),
        ('{"event": "run", "config": 3, "world_size": 1}\n', "needs config"),
        ('{"event": "run", "config": "x: 1", "world_size": 1}\n{"event": "step"}\n', "not that of this v"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text.replace("device: ascend-910b2", "device: cpu"))
    with pytest.raises(UserError, match=message) as caught:
        read_run(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_run_without_memory_does_not_calibrate(tmp_path):
    file = log(tmp_path, 4, lambda worst: 1e10)
    path = tmp_path / "metrics-4.jsonl"
    path.write_text(path.read_text().replace('"memory_bytes"', '"other"'))
    with pytest.raises(UserError, match="no run tells its memory"):
        calibrate([read_run(file)])
    with pytest.raises(UserError, match="cannot read this log"):
        read_run(tmp_path / "none.jsonl")

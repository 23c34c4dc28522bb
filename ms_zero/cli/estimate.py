"""``ms-zero estimate``: memory and time of a run file, and what to do about its troubles."""

from collections.abc import Sequence

from ms_zero.config import Loaded, load_config
from ms_zero.errors import UserError
from ms_zero.hardware import Device, load_device
from ms_zero.plan.diagnose import remedies_for
from ms_zero.plan.explain import count_text, describe, memory_lines, time_lines, traffic_line
from ms_zero.plan.memory import Calibration, MemoryModel, explain_shortage, require_valid
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.run import layout_of, memory_model_of
from ms_zero.plan.time import TimeModel


def estimate(
    *,
    run: str,
    overrides: Sequence[str],
    workers: int | None,
    cluster: str | None,
    calibrate: Sequence[str],
    diagnose: str | None,
) -> int:
    """Print what a run needs and how long it takes; 2 if it does not fit.

    A run file that this version cannot run yet is estimated all the same, and the reasons are listed.
    """
    loaded = load_config(run, overrides, workers, to_run=False)
    layout = layout_of(loaded.config)
    calibration = calibration_from(calibrate, loaded.config.hardware.target)
    memory = memory_model_of(loaded.config, loaded.label, calibration)
    require_valid(layout, memory.shape)
    name = cluster or loaded.config.hardware.device
    device = load_device(name) if name else None
    capacity = device.usable_memory if device else None
    time, reason = _time_model(loaded, memory, device)
    lines = [f"{memory.shape.name}: {count_text(count_parameters(memory.shape))} parameters"]
    lines.append(f"{loaded.world_size} workers: {describe(layout)}")
    report = memory.report(layout)
    lines += memory_lines(report, capacity)
    shortage = explain_shortage(report, capacity) if capacity else ""
    lines += [shortage] if shortage else []
    lines += time_lines(time.simulate(layout)) if time else [f"no time is predicted: {reason}"]
    mean = sum(stage.parameters for stage in report.stages) / layout.pp
    lines += traffic_line(memory.shape, layout, mean)
    lines += [f"this version cannot run it: {finding}" for finding in loaded.unavailable]
    if diagnose:
        lines += remedies_for(diagnose, loaded.config, layout, memory, time, capacity)
    print("\n".join(lines))
    return 2 if shortage else 0


def calibration_from(logs: Sequence[str], target: str) -> Calibration | None:
    """Correct the memory model by runs measured on a kind of device; None without any."""
    if not logs:
        return None
    from ms_zero.plan.calibrate import calibrate, read_run

    return calibrate([read_run(log) for log in logs], target)


def _time_model(loaded: Loaded, memory: MemoryModel, device: Device | None) -> tuple[TimeModel | None, str]:
    if device is None:
        return None, "hardware.device is not set; name a device of the catalogue there or with --cluster"
    try:
        return TimeModel(memory.shape, device, loaded.config.precision.compute), ""
    except UserError as error:
        return None, str(error)



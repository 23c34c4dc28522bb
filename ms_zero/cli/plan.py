"""``ms-zero plan``: which layouts train a model on a cluster, and why."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ms_zero.cli.estimate import calibration_from
from ms_zero.errors import UserError
from ms_zero.hardware import load_device
from ms_zero.plan.explain import describe, explain_plan
from ms_zero.plan.html import write_page
from ms_zero.plan.planner import Plan, Request, limit_of, make_plan
from ms_zero.plan.runfile import write_run_file

_LETTERS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def plan(
    *,
    model: str,
    cluster: str,
    devices: int,
    seq: int,
    tokens: str | None,
    global_batch: int | None,
    precision: str,
    no_offload: bool,
    calibrate: Sequence[str],
    top: int,
    write: str | None,
    html: str | None,
    json_path: str | None,
) -> int:
    """Print the answer and write it in other forms; 2 when nothing fits."""
    if top < 1:
        raise UserError(f"--top {top}: expected at least 1")
    request = Request(
        model=model,
        cluster=cluster,
        devices=devices,
        seq_len=seq,
        tokens=None if tokens is None else token_count(tokens),
        global_batch_size=global_batch,
        dtype=precision,
        offload=not no_offload,
        calibration=calibration_from(calibrate, load_device(cluster).target),
    )
    made = make_plan(request)
    print("\n".join(explain_plan(made, top)))
    if html:
        write_page(made, Path(html))
    if json_path:
        _write_json(made, Path(json_path))
    if write and made.choice is None:
        print(f"{write} was not written")
    elif write:
        limits = write_run_file(made, Path(write))
        print(f"wrote {write}" + ("; this version cannot run it as it is:" if limits else ""))
        print("\n".join(f"  {line}" for line in limits), end="\n" if limits else "")
    return 0 if made.choice is not None else 2


def token_count(text: str) -> float:
    """Read a number of tokens: 2T, 300B, 1.5e12; raises UserError for anything else."""
    stripped = text.strip().upper()
    factor = _LETTERS.get(stripped[-1:], 1.0)
    try:
        count = float(stripped[:-1] if factor > 1 else stripped) * factor
    except ValueError:
        count = math.nan
    if not 1 <= count <= 1e18:
        raise UserError(f"--tokens {text}: expected a number such as 2T, 300B or 1e12")
    return count


def _write_json(made: Plan, path: Path) -> None:
    best = [
        {
            "layout": describe(each.layout),
            "degrees": {
                axis: getattr(each.layout, axis)
                for axis in ("pp", "tp", "cp", "ep", "dp_replicate", "dp_shard")
            },
            "step_seconds": each.time.step,
            "causes": each.time.causes(),
            "tokens_per_second_per_device": each.time.tokens_per_second_per_device,
            "mfu": each.time.mfu,
            "memory_bytes": each.memory,
            "limited_by": limit_of(made, each),
        }
        for each in made.found.best
    ]
    answer = {
        "model": made.shape.name,
        "cluster": made.device.name,
        "devices": made.space.devices,
        "global_batch_size": made.space.global_batch_size,
        "recommended": describe(made.choice.layout) if made.choice else None,
        "best": best,
        "simpler": {each.name: each.outcome for each in made.simple},
        "remedies": list(made.remedies),
    }
    try:
        path.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the plan: {error.strerror}") from None

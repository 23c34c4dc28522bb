"""``ms-zero doctor``: checks the installation and this machine, one line a check."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ms_zero import __version__
from ms_zero.cli import doctor_install, doctor_kernels, doctor_machine
from ms_zero.cli.doctor_check import Check, problem, skipped
from ms_zero.cli.doctor_collective import check_collective
from ms_zero.cli.launch_console import Console
from ms_zero.errors import UserError, one_line

_LIGHT_CHECKS: Sequence[tuple[str, Callable[[], Sequence[Check]]]] = (
    ("python", doctor_install.check_python),
    ("ms_zero", doctor_install.check_package),
    ("versions", doctor_install.check_requirements),
    ("compilers", doctor_install.check_compilers),
    ("kernels", doctor_kernels.check_kernels),
    ("environment", doctor_machine.check_environment),
    ("cores", doctor_machine.check_cores),
    ("memory", doctor_machine.check_memory),
    ("disk", doctor_machine.check_disk),
    ("shared memory", doctor_machine.check_shared_memory),
    ("host name", doctor_machine.check_host_name),
)


def doctor(*, json_path: str | None, collective: bool, target: str, timeout_s: int) -> int:
    """Run all checks and print their results; returns 1 if there is a problem, else 0.

    mindspore is imported in a process of its own, so that this works where mindspore does not.
    """
    if timeout_s < 1:
        raise UserError(f"--timeout {timeout_s}: at least 1 second is needed")
    console = Console(sys.stdout)
    checks = []
    for check in _run(collective, target, timeout_s, console):
        checks.append(check)
        console.line(_line(check))
    problems = sum(check.status == "problem" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    console.line(f"ms-zero doctor: {_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    if json_path is not None:
        _write(Path(json_path), checks)
    return 1 if problems else 0


def _run(collective: bool, target: str, timeout_s: int, console: Console) -> Iterator[Check]:
    for name, check in _LIGHT_CHECKS:
        yield from _guarded(name, check)
    console.status("importing mindspore ...")
    devices, checks = doctor_install.check_mindspore(timeout_s)
    yield from checks
    if not collective:
        yield skipped("collective", "not asked for (--no-collective)")
    elif devices is None:
        yield skipped("collective", "mindspore does not run")
    elif not devices.get(target):
        yield problem("collective", f"no {target} device is available", "choose another --target")
    else:
        console.status(f"starting 2 workers on {target} ...")
        yield from _guarded("collective", lambda: [check_collective(target, timeout_s)])


def _guarded(name: str, check: Callable[[], Sequence[Check]]) -> Sequence[Check]:
    """Run a check; a machine so unwell that the check itself fails is a finding too."""
    try:
        return check()
    except (OSError, UserError) as error:
        return [problem(name, f"could not be checked: {error}", "correct what the message names")]


def _line(check: Check) -> str:
    fix = f"; to fix: {check.fix}" if check.fix else ""
    return one_line(f"{check.status:8s} {check.name:14s} {check.message}{fix}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _write(path: Path, checks: Sequence[Check]) -> None:
    """Write all results as one JSON object."""
    worst = next((s for s in ("problem", "warning") if any(check.status == s for check in checks)), "ok")
    record = {"ms_zero": __version__, "status": worst, "checks": [asdict(check) for check in checks]}
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--json {one_line(str(path))}: cannot write it ({one_line(str(error))})") from None

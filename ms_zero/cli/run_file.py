"""``ms-zero lint``, ``config show`` and ``explain``: what a run file says, before anything is started."""

import sys
from collections.abc import Sequence

from ms_zero.cli.main import abandon_stdout
from ms_zero.config import check_config, describe, describe_all, load_config, render_effective
from ms_zero.errors import UserError, one_line


def lint(run: str, overrides: Sequence[str], workers: int | None) -> int:
    """Print every finding, then one line of verdict.

    Returns 0 for a file that can be run, 2 if it is refused, 3 if it is right but this version cannot run it.

    Without ``workers`` the smallest number is taken that the degrees and batch sizes allow.
    """
    checked = check_config(run, overrides, workers)
    lines = [f"{finding.severity}: {finding}" for finding in checked.findings]
    severities = [finding.severity for finding in checked.findings]
    errors, unavailable, warnings = (severities.count(name) for name in ("error", "unavailable", "warning"))
    if checked.findings:
        rule = checked.findings[0].rule
        lines.append(f"'ms-zero explain {rule}' tells more about {rule}")
    verdict = "refused" if errors else "valid, but this version cannot run it," if unavailable else "valid"
    reasons = f", {unavailable} not available" if unavailable else ""
    chosen = "" if workers is not None else " (the fewest that fit; --workers N checks for N)"
    lines.append(
        f"{one_line(checked.label)}: {verdict} for {_count(checked.world_size, 'worker')}{chosen}: "
        f"{_count(errors, 'error')}, {_count(warnings, 'warning')}{reasons}"
    )
    _show("\n".join(lines))
    return 2 if errors else 3 if unavailable else 0


def show_config(run: str, overrides: Sequence[str], workers: int | None) -> int:
    """Print the effective config as YAML with the origin of each value; warnings go to stderr."""
    loaded = load_config(run, overrides, workers, to_run=False)
    _show(render_effective(loaded).rstrip("\n"))
    for finding in (*loaded.unavailable, *loaded.warnings):
        print(f"ms-zero: warning: {finding}", file=sys.stderr)
    return 0


def explain(topic: str | None) -> int:
    """Print what a rule, a section or a key is about; without a topic, list them."""
    more = "'ms-zero explain MZ012', 'ms-zero explain train' and 'ms-zero explain train.steps' tell more"
    _show(f"{describe_all()}\n{more}" if topic is None else describe(topic))
    return 0


def _show(text: str) -> None:
    """Print to the end; a stdout that takes no more (a full disk) is an error of the user."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise UserError(f"cannot write the output: {error.strerror}") from None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

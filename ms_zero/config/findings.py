"""What is wrong with a config, as data: one finding a violation, one exception for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ms_zero.errors import UserError, one_line

Severity = Literal["error", "unavailable", "warning"]

_MAX_LINES = 50


@dataclass(frozen=True)
class Finding:
    """One violation, one thing that this version cannot run, or one warning.

    Args:
        rule: Id of the rule, a key of `ms_zero.config.rules.EXPLANATIONS`.
        severity: An error refuses the config. `unavailable`: the config is right and can be planned,
            translated and shown, but this version cannot run it, so starting it is refused. A warning is
            shown and training goes on.
        path: Dotted key, or "" when the finding is about a whole file.
        where: `file:line`, the override as typed, or the file when the key is not in it.
        message: What is wrong, what was expected and how to fix it, on one line.

    """

    rule: str
    severity: Severity
    path: str
    where: str
    message: str

    def __str__(self) -> str:
        """Render as one line."""
        place = ": ".join(part for part in (self.where, self.path) if part)
        return one_line(f"{place}: {self.message} [{self.rule}]")


class ConfigError(UserError):
    """The config is refused; `findings` holds every violation, the message has a line for each."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        lines = [str(finding) for finding in self.findings[:_MAX_LINES]]
        if len(self.findings) > _MAX_LINES:
            lines.append(f"... and {len(self.findings) - _MAX_LINES} more violations")
        super().__init__("\n".join(lines))


def show(value: Any) -> str:
    """Render a value of unknown origin for a message: short, printable, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

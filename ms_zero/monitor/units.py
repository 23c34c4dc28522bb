"""Numbers as short text: three significant digits and a unit. None and NaN are "n/a" and "nan"."""

import math

_COUNT_UNITS = ("", "k", "M", "G", "T", "P", "E")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_count(value: float | None) -> str:
    """640, 81.9k, 1.20M."""
    return _scaled(value, 1000, _COUNT_UNITS)


def format_bytes(value: float | None) -> str:
    """512MiB, 60.9GiB; binary units."""
    return _scaled(value, 1024, _BYTE_UNITS)


def format_duration(seconds: float | None) -> str:
    """45s, 1m23s, 2h05m, 3d04h; a negative duration is 0s."""
    if seconds is None or not math.isfinite(seconds):
        return "n/a"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if value is None:
        return "n/a"
    if not math.isfinite(value):
        return str(value)
    power = 0
    while abs(value) >= base - 0.5 and power < len(units) - 1:  # what would round to 1000 moves up
        value /= base
        power += 1
    size = abs(value)
    if power == 0 and value == int(value):
        return f"{value:.0f}{units[0]}"
    if size < 0.01:
        return f"{value:.1e}{units[power]}"
    decimals = sum(size < limit for limit in (0.9995, 9.995, 99.95))
    return f"{value:.{decimals}f}{units[power]}"

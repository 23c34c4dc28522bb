"""Memory of this process."""

import os
from pathlib import Path


def host_rss_bytes() -> int | None:
    """Resident memory of this process in bytes, or None where /proc does not tell."""
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return None
    return resident_pages * os.sysconf("SC_PAGE_SIZE")

"""What a run tells: a console line per step for people, JSON lines for machines. Needs no mindspore."""

from ms_zero.monitor.memory import host_rss_bytes
from ms_zero.monitor.monitor import Monitor
from ms_zero.monitor.record import StepRecord, format_line
from ms_zero.monitor.throughput import Rates, Throughput

__all__ = ["Monitor", "Rates", "StepRecord", "Throughput", "format_line", "host_rss_bytes"]

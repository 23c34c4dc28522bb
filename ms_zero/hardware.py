"""The device catalogue: peak rates and memory of known devices, each value with its source.

Reads `configs/clusters/<name>.yaml`. A value that nobody has published is absent (None), never guessed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ms_zero import resources
from ms_zero.errors import UserError

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
TARGETS = ("CPU", "Ascend", "GPU")
_COUNTS = ("memory_bytes", "visible_memory_bytes", "memory_bandwidth", "link_bandwidth", "vector_cores")
_COUNTS += ("devices_per_node", "host_memory_bytes")
_RATES = ("intra_bandwidth", "inter_bandwidth", "intra_latency", "inter_latency")
_RATES += ("host_bandwidth", "nvme_bandwidth")
_UNSEEN_SHARE = 0.05  # of the nominal memory, kept by driver and runtime, when no visible size is known


@dataclass(frozen=True)
class Device:
    """One device as the framework sees it (a die, where a package holds several).

    Args:
        name: Catalogue name, the file name without `.yaml`.
        target: MindSpore device target: CPU, Ascend or GPU.
        peak_flops: Dense peak in FLOP/s for each dtype that has a published figure.
        memory_bytes: Nominal device memory in bytes.
        visible_memory_bytes: What the runtime reports as usable, in bytes.
        memory_bandwidth: Bytes per second to device memory.
        link_bandwidth: Bytes per second to other devices of the same node, all links, both directions.
        vector_cores: Number of vector cores.
        devices_per_node: Devices that share a host and the fast links.
        intra_bandwidth: Bytes per second and direction that a device reaches in collectives within a node.
        inter_bandwidth: The same between nodes.
        intra_latency: Seconds of one message within a node.
        inter_latency: Seconds of one message between nodes.
        host_bandwidth: Bytes per second and direction between one device and its host.
        host_memory_bytes: Memory of one host in bytes.
        nvme_bandwidth: Bytes per second between the disks of a node and one device's share of the host.
        sources: Where each value comes from: `peak_flops.<dtype>` or the field name -> text.

    """

    name: str
    target: str
    peak_flops: Mapping[str, float]
    memory_bytes: int | None
    visible_memory_bytes: int | None
    memory_bandwidth: int | None
    link_bandwidth: int | None
    vector_cores: int | None
    sources: Mapping[str, str]
    devices_per_node: int | None = None
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    intra_latency: float | None = None
    inter_latency: float | None = None
    host_bandwidth: float | None = None
    host_memory_bytes: int | None = None
    nvme_bandwidth: float | None = None

    @property
    def usable_memory(self) -> float | None:
        """Bytes that a process can have: what the runtime reports, else the nominal size less 5 %."""
        if self.visible_memory_bytes is not None:
            return float(self.visible_memory_bytes)
        return None if self.memory_bytes is None else self.memory_bytes * (1 - _UNSEEN_SHARE)


def device_names() -> tuple[str, ...]:
    """Return the names of all devices in the catalogue."""
    return resources.list_presets("clusters")


def load_device(name: str) -> Device:
    """Read one device: a name of the catalogue, or the path of a user's own file ending in .yaml.

    Raises UserError for an unknown name or a malformed entry.
    """
    if name.endswith((".yaml", ".yml")):
        return read_device(Path(name))
    return read_device(resources.find_preset("clusters", name))


def peak_flops(name: str | None, dtype: str) -> float | None:
    """Return the dense peak in FLOP/s of device `name` for `dtype` (one of DTYPES).

    None means that no peak is known, for this dtype or because the device itself is not known (`name` is
    None): the model FLOPs utilisation is then not available.
    """
    assert dtype in DTYPES, dtype
    return None if name is None else load_device(name).peak_flops.get(dtype)


def read_device(path: Path) -> Device:
    """Read one catalogue entry from a file; raises UserError naming the file and the key that is wrong."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot read this device: {' '.join(str(error).split())}") from None
    known = {"target", "peak_flops", *_COUNTS, *_RATES}
    if not isinstance(raw, dict) or not known.issuperset(raw):
        raise UserError(f"{path}: expected a mapping with keys {', '.join(sorted(known))}")
    if raw.get("target") not in TARGETS:
        raise UserError(f"{path}: target: expected one of {', '.join(TARGETS)}")
    peaks = raw.get("peak_flops") or {}
    if not isinstance(peaks, dict) or not set(DTYPES).issuperset(peaks):
        raise UserError(f"{path}: peak_flops: expected a mapping from dtype ({', '.join(DTYPES)})")
    entries = {f"peak_flops.{dtype}": entry for dtype, entry in peaks.items()}
    entries |= {key: raw[key] for key in (*_COUNTS, *_RATES) if key in raw}
    figures = {key: _figure(path, key, entry) for key, entry in entries.items()}
    return Device(
        name=path.stem,
        target=raw["target"],
        peak_flops=MappingProxyType({dtype: figures[f"peak_flops.{dtype}"][0] for dtype in peaks}),
        sources=MappingProxyType({key: source for key, (_, source) in figures.items()}),
        **{key: int(figures[key][0]) if key in figures else None for key in _COUNTS},
        **{key: figures[key][0] if key in figures else None for key in _RATES},
    )


def _figure(path: Path, key: str, entry: Any) -> tuple[float, str]:
    """Return (value, source) of one catalogue figure; a figure without a source is refused."""
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise UserError(f"{path}: {key}: expected exactly the keys value and source")
    value, source = entry["value"], entry["source"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{path}: {key}.value: {value!r} is not a positive number (write 3.78e+14)")
    if not isinstance(source, str) or not source.strip():
        raise UserError(f"{path}: {key}.source: say where the value comes from")
    return float(value), source

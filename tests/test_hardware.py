import subprocess
import sys

import pytest

from ms_zero.errors import UserError
from ms_zero.hardware import TARGETS, device_names, load_device, peak_flops, read_device

NETWORK = (
    "devices_per_node",
    "intra_bandwidth",
    "inter_bandwidth",
    "intra_latency",
    "inter_latency",
    "host_bandwidth",
    "host_memory_bytes",
    "nvme_bandwidth",
)


@pytest.mark.parametrize(
    ("name", "teraflops", "memory_gb"),
    [
        ("ascend-910b1", 378, 64),
        ("ascend-910b2", 354, 64),
        ("ascend-910b3", 295, 64),
        ("ascend-910b4", 246, 32),
        ("ascend-910c-die", 376, 64),
        ("nvidia-a100-sxm-80gb", 312, 80),
        ("nvidia-h100-sxm", 990, 80),
        ("nvidia-h200-sxm", 990, 141),
    ],
)
def test_published_figures(name, teraflops, memory_gb):
    assert peak_flops(name, "bf16") == teraflops * 1e12
    assert load_device(name).memory_bytes == memory_gb * 10**9


@pytest.mark.parametrize("name", device_names())
def test_every_entry_is_complete(name):
    device = load_device(name)
    assert device.name == name
    assert device.target in TARGETS
    assert set(device.sources) >= {f"peak_flops.{dtype}" for dtype in device.peak_flops}
    for figure in (
        "memory_bytes",
        "visible_memory_bytes",
        "memory_bandwidth",
        "link_bandwidth",
        "vector_cores",
        *NETWORK,
    ):
        assert (getattr(device, figure) is not None) == (figure in device.sources)
    if device.visible_memory_bytes is not None:
        assert 0.9 * device.memory_bytes < device.visible_memory_bytes < 2**30 / 10**9 * device.memory_bytes


@pytest.mark.parametrize("name", [name for name in device_names() if name != "cpu"])
def test_every_accelerator_has_what_a_plan_needs(name):
    device = load_device(name)
    assert all(getattr(device, figure) is not None for figure in (*NETWORK, "memory_bytes"))
    assert device.inter_bandwidth < device.intra_bandwidth
    assert device.usable_memory < 2**30 / 10**9 * device.memory_bytes
    for figure in ("intra_bandwidth", "intra_latency"):
        assert len(device.sources[figure]) > 10


def test_the_unnamed_910b_is_the_bin_that_it_says():
    unnamed, assumed = load_device("ascend-910b"), load_device("ascend-910b2")
    assert (unnamed.peak_flops, unnamed.usable_memory) == (assumed.peak_flops, assumed.usable_memory)
    assert assumed.usable_memory == pytest.approx(60.97 * 2**30, rel=1e-9)


def test_without_a_visible_size_a_share_is_left_out():
    assert load_device("ascend-910b4").usable_memory == pytest.approx(0.95 * 32e9)
    assert load_device("cpu").usable_memory is None


def test_users_bring_their_own_file(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(
        "target: Ascend\nmemory_bytes: {value: 1.0e+9, source: x}\n"
        "intra_latency: {value: 1.0e-6, source: x}\n"
    )
    device = load_device(str(path))
    assert (device.name, device.memory_bytes, device.intra_latency) == ("ours", 10**9, 1e-6)


def test_what_is_not_published_is_none():
    assert load_device("cpu").peak_flops == {}
    assert peak_flops("cpu", "fp32") is None
    assert peak_flops("ascend-910b2", "fp32") is None
    assert peak_flops(None, "bf16") is None


def test_an_unknown_dtype_is_a_bug():
    with pytest.raises(AssertionError):
        peak_flops("cpu", "bfloat16")


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(UserError, match="did you mean ascend-910b"):
        load_device("ascend-910b9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("[", "cannot read this device"),
        ("target: TPU", "target: expected one of CPU, Ascend, GPU"),
        ("target: CPU\nclock: 3", "expected a mapping with keys"),
        ("target: GPU\npeak_flops: {bfloat16: {value: 1.0, source: x}}", "mapping from dtype"),
        ("target: GPU\nmemory_bytes: 64", "memory_bytes: expected exactly the keys value and source"),
        ("target: GPU\nmemory_bytes: {value: 64}", "expected exactly the keys value and source"),
        ("target: GPU\nmemory_bytes: {value: 64, source: ' '}", "say where the value comes from"),
        ("target: GPU\nmemory_bytes: {value: -1, source: x}", "-1 is not a positive number"),
        ("target: GPU\nmemory_bytes: {value: true, source: x}", "True is not a positive number"),
        ("target: GPU\nmemory_bytes: {value: .nan, source: x}", "nan is not a positive number"),
        ("target: GPU\nmemory_bytes: {value: 3e14, source: x}", "'3e14' is not a positive number"),
        ("target: !!python/name:os.system x", "cannot read this device"),
    ],
)
def test_a_malformed_entry_names_file_and_key(tmp_path, text, message):
    path = tmp_path / "device.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_device(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_catalogue_needs_no_numpy():
    code = "import sys, ms_zero.hardware; print(sorted({'mindspore', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

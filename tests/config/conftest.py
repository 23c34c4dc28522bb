import pytest

from ms_zero.config import ConfigError, load_config

BASE = """\
include: [models/gpt-tiny]
data: {seq_len: 64}
train: {steps: 10, global_batch_size: 8, accumulation_steps: 1, output_dir: out}
optim: {warmup_steps: 2}
"""


@pytest.fixture
def write(tmp_path):
    """Write a file below a fresh folder; returns its path."""

    def write(content, name="run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def load(write):
    """Load a small valid config after changes by overrides."""

    def load(*overrides, world=1, text=BASE):
        return load_config(write(text), overrides, world)

    return load


@pytest.fixture
def refused(write):
    """Load a config that must be refused; returns the findings."""

    def refused(*overrides, world=1, text=BASE):
        with pytest.raises(ConfigError) as caught:
            load_config(write(text), overrides, world)
        lines = str(caught.value).splitlines()
        assert len(lines) == len(caught.value.findings) or lines[-1].startswith("... and ")
        assert all(line.isprintable() for line in lines)
        return caught.value.findings

    return refused

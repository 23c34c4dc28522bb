"""What an import pulls in: the light parts of the package must stay light."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Works without mindspore; numpy is allowed unless the module is in WITHOUT_NUMPY.
WITHOUT_MINDSPORE = (
    "ms_zero.mesh",
    "ms_zero.hardware",
    "ms_zero.rng",
    "ms_zero.resources",
    "ms_zero.config",
    "ms_zero.presets",
    "ms_zero.plan.flops",
    "ms_zero.data",
    "ms_zero.checkpoint",
    "ms_zero.monitor",
)
WITHOUT_NUMPY = (
    "ms_zero",
    "ms_zero.errors",
    "ms_zero.cli.main",
    "ms_zero.cli.train",
    "ms_zero.cli.launch",
    "ms_zero.__main__",
    "ms_zero.mesh",
    "ms_zero.config",
)

COMMANDS = ([], ["train"], ["launch"], ["lint"], ["explain"], ["config"], ["translate"], ["doctor"])


def modules_after(code):
    """Names in sys.modules after running `code` in a fresh interpreter."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint('\\n' + '\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


@pytest.mark.parametrize("name", WITHOUT_NUMPY)
def test_module_imports_neither_mindspore_nor_numpy(name):
    assert modules_after(f"import {name}") & {"mindspore", "numpy"} == set()


@pytest.mark.parametrize("name", WITHOUT_MINDSPORE)
def test_module_does_not_import_mindspore(name):
    assert "mindspore" not in modules_after(f"import {name}")


@pytest.mark.parametrize(
    "arguments",
    [["--version"], *([*command, "--help"] for command in COMMANDS)],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(arguments):
    loaded = modules_after(f"from ms_zero.cli.main import main; main({arguments})")
    assert "ms_zero.cli.main" in loaded
    assert loaded & {"mindspore", "numpy", "yaml", "ms_zero.config", "ms_zero.cli.launch_supervisor"} == set()
    # A start costs time in proportion to what is loaded; argparse and its own imports are about 60 modules.
    own = {name for name in loaded if name.startswith("ms_zero")}
    assert own == {"ms_zero", "ms_zero.cli", "ms_zero.cli.main", "ms_zero.errors"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["lint", "runs/quickstart"],
        ["lint", "runs/quickstart", "train.stpes=3"],
        ["config", "show", "runs/quickstart"],
        ["explain", "MZ012"],
        ["explain"],
        ["translate", "to-deepspeed", "runs/quickstart"],
        ["translate", "fsdp", "tests/config/examples/fsdp-accelerate.yaml"],
        ["train", "runs/quickstart", "train.stpes=3"],
        ["launch", "runs/quickstart", "--workers", "2", "train.stpes=3"],
    ],
    ids=" ".join,
)
def test_what_only_reads_the_run_file_loads_neither_mindspore_nor_numpy(arguments):
    loaded = modules_after(f"from ms_zero.cli.main import main; main({arguments})")
    assert "ms_zero.config" in loaded
    assert loaded & {"mindspore", "numpy"} == set()


def test_the_doctor_needs_no_package_to_start():
    loaded = modules_after("import ms_zero.cli.doctor")
    assert loaded & {"mindspore", "numpy", "yaml"} == set()

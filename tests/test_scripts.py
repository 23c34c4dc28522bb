"""The shell scripts, with stand-ins for what they call: no network, no training."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "cat", "cmp", "date", "dirname", "flock", "grep", "head", "ls", "mv", "readlink", "rm")
TOOLS += ("sed", "tail")


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def repository(tmp_path):
    """A copy of what the scripts need, in a path with spaces."""
    root = tmp_path / "a source tree"
    root.mkdir()
    for name in ("scripts", "configs", "ms_zero"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, root / name)
    return root


@pytest.fixture
def tools(tmp_path):
    """A folder with the system tools that scripts use and nothing else: the PATH of a bare machine."""
    folder = tmp_path / "bare bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    return folder


def bash(command, cwd, **environment):
    base = {"HOME": str(cwd), "LC_ALL": "C", "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env={**base, **environment}, capture_output=True, text=True
    )


def setup(repository, tools, level="base", **environment):
    command = f'set -eu; source "{repository}/scripts/_setup.sh"; ms_zero_setup {level}; echo done'
    return bash(command, repository.parent, PATH=str(tools), **environment)


FAKE_PYTHON = """#!/bin/bash
# A Python that can do what the comment lines say, and creates environments that contain itself.
case "$*" in
    *ensurepip*) {venv} ;;
    "-m venv "*) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python" ;;
    *"pip install"*) echo "pip $*" >>"{log}"; {pip}; cp "$0" "${{0%/*}}/ms-zero" ;;
    *"import mindspore"*) {mindspore} ;;
    *realpath*) readlink -f "${{0%/bin/*}}" ;;
    *sys.version_info*2]\\)) echo 3.11 ;;
    *sys.version*) echo 3.11.0 ;;
esac
exit 0
"""


def add_python(tools, log, *, venv="exit 0", pip="true", mindspore="exit 0", gxx=True):
    for name in ("mkdir", "touch", "cp"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name))
    text = FAKE_PYTHON.format(venv=venv, pip=pip, mindspore=mindspore, log=log)
    executable(tools / "python3.11", text)
    if gxx:
        executable(tools / "g++", "#!/bin/bash\n")


def test_setup_without_a_fitting_python_names_the_package(repository, tools):
    done = setup(repository, tools)
    assert done.returncode == 2
    assert "apt-get install python3 python3-venv" in done.stderr and "3.10, 3.11 or 3.12" in done.stderr


def test_setup_names_every_missing_package_at_once(repository, tools, tmp_path):
    add_python(tools, tmp_path / "log", venv="exit 1", gxx=False)
    done = setup(repository, tools)
    assert done.returncode == 2
    assert "apt-get install python3.11-venv g++" in done.stderr


def test_setup_refuses_a_named_python_that_does_not_run(repository, tools):
    done = setup(repository, tools, PYTHON="/no/such/python")
    assert done.returncode == 2 and "PYTHON=/no/such/python" in done.stderr


def test_setup_installs_once_and_again_only_for_more_or_after_a_change(repository, tools, tmp_path):
    log = tmp_path / "log"
    add_python(tools, log)

    def installs(level):
        done = setup(repository, tools, level)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        return len(log.read_text().splitlines())

    assert installs("base") == 1
    assert installs("base") == 1
    assert installs("test") == 2
    assert installs("base") == 2, "an environment for tests serves all"
    (repository / "setup.py").write_text((repository / "setup.py").read_text() + "\n# changed\n")
    assert installs("base") == 3
    assert f"{repository}[test]" in log.read_text()


def test_setup_makes_a_broken_or_moved_environment_anew(repository, tools, tmp_path):
    add_python(tools, tmp_path / "log")
    assert setup(repository, tools).returncode == 0
    (repository / ".venv" / "bin" / "python").unlink()
    (repository / ".venv" / "bin" / "python").symlink_to("/gone/python3.11")
    done = setup(repository, tools)
    assert done.returncode == 0 and "making it anew" in done.stderr
    moved = repository.rename(repository.with_name("elsewhere"))
    done = setup(moved, tools)
    assert done.returncode == 0 and "making it anew" in done.stderr


def test_setup_goes_on_after_an_install_that_failed(repository, tools, tmp_path):
    add_python(tools, tmp_path / "log", pip="exit 1")
    assert setup(repository, tools).returncode == 2
    shutil.rmtree(repository / ".venv")
    add_python(tools, tmp_path / "log")
    assert setup(repository, tools).returncode == 0


def test_setup_does_not_delete_a_folder_that_is_no_environment(repository, tools, tmp_path):
    add_python(tools, tmp_path / "log")
    precious = repository / ".venv" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    done = setup(repository, tools)
    assert done.returncode == 2 and "is in the way" in done.stderr
    assert precious.exists()


def test_setup_names_the_system_library_that_mindspore_misses(repository, tools, tmp_path):
    message = "ImportError: libgomp.so.1: cannot open shared object file: No such file or directory"
    add_python(tools, tmp_path / "log", mindspore=f'echo "{message}"; exit 1')
    done = setup(repository, tools)
    assert done.returncode == 2 and "apt-get install libgomp1" in done.stderr


# Writes a checkpoint of the step that the file `progress` names, as an interrupted or a complete run does.
FAKE_MS_ZERO = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from ms_zero.checkpoint import save
print("ms-zero", *sys.argv[1:])
step = int(Path("progress").read_text())
root = Path("runs/quickstart/checkpoints")
state = {{"progress": {{"step": step}}}}
save(root, step, [], state, rank=0, world_size=1, exchange=lambda x: [x], barrier=lambda: None)
"""


@pytest.fixture
def quickstart(repository):
    """Runs quickstart.sh in an environment that is complete already, with a stand-in for ms-zero."""
    binaries = repository / ".venv" / "bin"
    executable(binaries / "python", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    (repository / "fake_ms_zero.py").write_text(FAKE_MS_ZERO.format(root=str(repository)))
    command = f'exec "{sys.executable}" "{repository}/fake_ms_zero.py" "$@"'
    executable(binaries / "ms-zero", f"#!/bin/bash\n{command}\n")
    stamp = (
        f'source "{repository}/scripts/_setup.sh"; '
        'ms_zero_fingerprint "$MS_ZERO_VENV/bin/python" >"$MS_ZERO_VENV/ms_zero-base"'
    )
    assert bash(stamp, repository).returncode == 0

    def run(progress, *arguments):
        (repository / "progress").write_text(str(progress))
        quoted = " ".join(f"'{argument}'" for argument in arguments)
        command = f'bash "{repository}/scripts/quickstart.sh" {quoted}'
        return bash(command, repository.parent, PYTHONPATH=str(repository))

    return run


def test_quickstart_resumes_reports_and_restarts(quickstart, repository):
    first = quickstart(120)
    assert first.returncode == 0, first.stderr
    assert "ms-zero launch configs/runs/quickstart.yaml --workers 2\n" in first.stdout
    assert "stopped after step 120 of 200; run this script again to go on" in first.stdout

    second = quickstart(200)
    assert "going on after step 120 of 200" in second.stdout
    assert "ms-zero launch" in second.stdout and "What to try next" in second.stdout

    third = quickstart(200)
    assert "is finished: 200 of 200 steps" in third.stdout and "What to try next" in third.stdout
    assert "ms-zero launch configs/runs/quickstart.yaml --workers 2\n" not in third.stdout

    fourth = quickstart(200, "--restart", "--workers", "4", "train.seed=7")
    assert "starting afresh; the earlier run is kept in runs/quickstart." in fourth.stdout
    assert "ms-zero launch configs/runs/quickstart.yaml --workers 4 train.seed=7\n" in fourth.stdout
    (kept,) = (repository / "runs").glob("quickstart.*")
    assert (kept / "checkpoints" / "step-00000120").is_dir()


def test_quickstart_extends_a_finished_run(quickstart):
    quickstart(200)
    assert "going on after step 200 of 300" in quickstart(300, "train.steps=300").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frist"], "unknown option --frist"),
        (["--workers", "two"], "--workers two: a positive whole number is needed"),
        (["train.stesp=3"], "train.stesp"),
    ],
)
def test_quickstart_refuses_wrong_arguments_in_one_line(quickstart, arguments, message):
    done = quickstart(200, *arguments)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert "ms-zero launch" not in done.stdout


def ascend(tmp_path, *arguments, **environment):
    executable(tmp_path / "fake cli", '#!/bin/bash\nprintf "%s\\n" "$@"\n')
    quoted = " ".join(f"'{argument}'" for argument in arguments)
    command = f'bash "{REPOSITORY}/scripts/launch_ascend.sh" {quoted}'
    defaults = {"ASCEND_HOME_PATH": "/opt/cann", "MS_ZERO": str(tmp_path / "fake cli")}
    return bash(command, tmp_path, **{**defaults, **environment})


def test_launch_ascend_passes_totals_and_rank_on(tmp_path):
    done = ascend(tmp_path, "run.yaml", "--nodes", "2", "--master", "n0", "train.steps=3", SLURM_NODEID="1")
    assert done.stdout.splitlines() == [
        *("launch", "run.yaml", "--workers", "16", "--nodes", "2", "--cluster-timeout", "900"),
        *("--node-rank", "1", "--master", "n0", "hardware.target=Ascend", "train.steps=3"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run file given"),
        (["run.yaml", "--nodes", "2"], "needs --master"),
        (["run.yaml", "--nodes", "2", "--master", "n0"], "needs --node-rank"),
        (["run.yaml", "--nodes", "0"], "positive whole numbers, not '0'"),
        (["run.yaml", "--port"], "--port needs a value"),
    ],
)
def test_launch_ascend_refuses_wrong_arguments(tmp_path, arguments, message):
    done = ascend(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_launch_ascend_sources_cann_or_says_that_it_is_missing(tmp_path):
    missing = ascend(tmp_path, "run.yaml", ASCEND_HOME_PATH="", ASCEND_TOOLKIT_HOME=str(tmp_path))
    assert missing.returncode == 2 and "CANN was not found" in missing.stderr
    (tmp_path / "set_env.sh").write_text("echo sourced $NOT_SET\n")
    found = ascend(tmp_path, "run.yaml", ASCEND_HOME_PATH="", ASCEND_TOOLKIT_HOME=str(tmp_path))
    assert found.stdout.splitlines()[:3] == ["sourced", "launch", "run.yaml"]

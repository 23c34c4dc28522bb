"""`ms-zero doctor` on machines that lack something: every finding is a line that says how to fix it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ms_zero import native
from ms_zero.cli import doctor as doctor_module
from ms_zero.cli import doctor_collective, doctor_install, doctor_kernels, doctor_machine
from ms_zero.cli.doctor_check import ok, problem, warning
from ms_zero.cli.main import main
from ms_zero.native import Compiler

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def clean(monkeypatch):
    """No variable of this shell disturbs the checks."""
    for name in list(os.environ):
        if name.startswith(("MS_", "OMP_", "GLOG_", "ASCEND_", "PYTHONOPT")):
            monkeypatch.delenv(name)


def run_doctor(*arguments, python=(sys.executable,), **environment):
    """A doctor process without the collective; returns status, {name: line}, stderr."""
    done = subprocess.run(
        [*python, "-m", "ms_zero", "doctor", "--no-collective", *arguments],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = {line[9:23].strip(): line for line in done.stdout.splitlines()}
    return done.returncode, lines, done.stderr


def fake_mindspore(folder, source):
    (folder / "mindspore").mkdir()
    (folder / "mindspore" / "__init__.py").write_text(source)
    return str(folder)


def test_without_any_package_it_tells_what_to_install():
    status, lines, errors = run_doctor(python=(sys.executable, "-S"))
    assert (status, errors) == (1, "")
    for name, wanted in doctor_install.REQUIREMENTS.items():
        assert lines[name].startswith("problem") and f"-m pip install '{name}{wanted}'" in lines[name]
    assert lines["import"].startswith("skipped") and lines["collective"].startswith("skipped")
    assert lines["python"].startswith("ok") and lines["ms_zero"].startswith("ok")


@pytest.mark.parametrize(
    ("source", "found", "fix"),
    [
        ("import nonexistent", "No module named 'nonexistent'", "pip install 'nonexistent'"),
        ("raise SystemError('numpy.core.multiarray failed to import')", "multiarray", "'numpy>=1.26,<2'"),
        ("raise ImportError('libgomp.so.1: cannot open shared object file')", "libgomp", "system package"),
        ("raise OSError(\"/lib/libc.so.6: version `GLIBC_2.99' not found\")", "GLIBC_2.99", "newer Linux"),
        ("import os; os.kill(os.getpid(), 4)", "killed by SIGILL", "another machine"),
        ("raise RuntimeError('odd\\x1b[31m')", "RuntimeError: odd\\x1b[31m", "to see the whole message"),
        ("import sys; sys.exit(3)", "no message", "to see the whole message"),
    ],
)
def test_a_mindspore_that_does_not_run_is_explained(clean, monkeypatch, tmp_path, source, found, fix):
    monkeypatch.setenv("PYTHONPATH", fake_mindspore(tmp_path, source))
    devices, (check,) = doctor_install.check_mindspore(60)
    assert devices is None
    assert check.status == "problem" and fix in check.fix
    assert found in doctor_module._line(check) and doctor_module._line(check).isprintable()


def test_a_mindspore_that_hangs_is_given_up(clean, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", fake_mindspore(tmp_path, "import time; time.sleep(100)"))
    devices, (check,) = doctor_install.check_mindspore(1)
    assert devices is None and "not ready after 1 s" in check.message


def test_a_working_mindspore_tells_its_devices(clean):
    devices, checks = doctor_install.check_mindspore(100)
    assert devices["CPU"] == 1
    assert [check.name for check in checks] == ["import", "devices"]
    assert checks[0].status == "ok" and "available: CPU (1)" in checks[1].message


@pytest.mark.parametrize(
    ("version", "wanted", "satisfied"),
    [
        ("2.10.0", "==2.10.0", True),
        ("2.10", "==2.10.0", True),
        ("2.9.0", "==2.10.0", False),
        ("2.10.0rc1", "==2.10.0", True),  # a build of the same release
        ("1.26.4", ">=1.26,<2", True),
        ("2.0.0", ">=1.26,<2", False),
        ("1.9", ">=1.26,<2", False),
        ("odd", ">=6.0", False),
    ],
)
def test_versions_compare_by_number(version, wanted, satisfied):
    assert doctor_install.satisfies(version, wanted) is satisfied


def test_requirements_are_those_of_the_package():
    text = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    required = set(re.search(r"install_requires=\[(.*?)\]", text, re.DOTALL).group(1).split('"')[1::2])
    assert required == {name + wanted for name, wanted in doctor_install.REQUIREMENTS.items()}
    low, high = (".".join(map(str, version)) for version in doctor_install.PYTHON)
    assert f'python_requires=">={low},<{high}"' in text


def test_a_wrong_version_and_a_wrong_python_are_problems(monkeypatch):
    monkeypatch.setattr(doctor_install.importlib.metadata, "version", lambda name: "2.0.0")
    statuses = {check.name: check.status for check in doctor_install.check_requirements()}
    assert statuses == {"mindspore": "problem", "numpy": "problem", "pyyaml": "problem"}
    monkeypatch.setattr(doctor_install.sys, "version_info", (3, 9, 1))
    (check,) = doctor_install.check_python()
    assert check.status == "problem" and "Python 3.10 to 3.12" in check.fix


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("MS_COMPILER_CACHE_ENABLE", "1", "problem"),
        ("MS_COMPILER_CACHE_ENABLE", "0", "ok"),
        ("MS_OP_PLUGIN_PATH", "/plugin.so", "problem"),
        ("MS_DEV_PRECOMPILE_ONLY", "1", "problem"),
        ("MS_SIMULATION_LEVEL", "0", "problem"),
        ("MS_ROLE", "MS_WORKER", "problem"),
        ("OMP_WAIT_POLICY", "ACTIVE", "warning"),
        ("OMP_WAIT_POLICY", "passive", "ok"),
        ("OMP_NUM_THREADS", "100000", "warning"),
        ("OMP_NUM_THREADS", "²", "warning"),
        ("OMP_NUM_THREADS", "1", "ok"),
        ("GLOG_v", "0", "warning"),
        ("GLOG_v", "3", "ok"),
        ("PYTHONOPTIMIZE", "1", "warning"),
        ("HOME", "/", "ok"),
    ],
)
def test_harmful_variables_are_named(name, value, status):
    (check,) = doctor_machine.check_environment({name: value})
    assert check.status == status
    assert status == "ok" or (check.message.startswith(f"{name}={value}: ") and check.fix)


def test_all_harmful_variables_are_listed_at_once():
    checks = doctor_machine.check_environment({"MS_ROLE": "MS_SCHED", "GLOG_v": "1"})
    assert [check.status for check in checks] == ["problem", "warning"]


def test_memory_is_bounded_by_the_control_group(tmp_path):
    meminfo = "MemTotal:  4000 kB\nMemAvailable:    2000 kB\n"
    assert doctor_machine.available_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_machine.available_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert doctor_machine.available_memory(meminfo, tmp_path) == 700
    (tmp_path / "memory.max").write_text("100\n")
    assert doctor_machine.available_memory(meminfo, tmp_path) == 0


def test_a_host_name_that_does_not_resolve_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor_machine.socket, "gethostname", lambda: "no-such-host.invalid")
    (check,) = doctor_machine.check_host_name()
    assert check.status == "warning" and "/etc/hosts" in check.fix


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor_machine.tempfile, "gettempdir", lambda: "/proc")
    checks = {check.name: check for check in doctor_machine.check_disk()}
    assert checks["temporary disk"].status == "problem" and "/proc" in checks["temporary disk"].message


def test_cann_is_looked_for_where_it_is_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert doctor_install.check_compilers()[-1].status == "warning"
    (tmp_path / "version.cfg").write_text("[8.1.RC1]\nversion=8.1.0\n")
    check = doctor_install.check_compilers()[-1]
    assert (check.name, check.status) == ("cann", "ok") and check.message.startswith("8.1.")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert doctor_install.check_compilers()[-1].status == "problem"


def test_without_a_compiler_there_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_install.check_compilers()[0].status == "warning"
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    assert "status 1" in doctor_install.check_compilers()[0].message


@pytest.fixture
def quick(monkeypatch):
    """A doctor with three checks, whose results the test gives."""

    def prepare(*checks, devices=None):
        monkeypatch.setattr(doctor_module, "_LIGHT_CHECKS", [("given", lambda: checks)])
        monkeypatch.setattr(doctor_install, "check_mindspore", lambda timeout_s: (devices, []))

    return prepare


@pytest.mark.parametrize(
    ("checks", "status", "worst"),
    [
        ([ok("a", "fine")], 0, "ok"),
        ([ok("a", "fine"), warning("b", "slow", "wait")], 0, "warning"),
        ([problem("c", "broken", "mend"), warning("b", "slow", "wait")], 1, "problem"),
    ],
)
def test_status_and_json_follow_the_worst_check(quick, tmp_path, capsys, checks, status, worst):
    quick(*checks)
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == status
    record = json.loads(path.read_text())
    assert record["status"] == worst
    assert record["checks"][0] == vars(checks[0])
    assert [entry["name"] for entry in record["checks"]] == [*(c.name for c in checks), "collective"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(checks) + 2
    assert "problem" not in lines[-1] or lines[-1].startswith("ms-zero doctor: ")
    assert all("; to fix: " in line for line in lines if line.startswith(("warning", "problem")))


def test_a_check_that_fails_itself_is_a_problem(quick, monkeypatch, capsys):
    quick()

    def broken():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(doctor_module, "_LIGHT_CHECKS", [("memory", broken)])
    assert main(["doctor", "--no-collective"]) == 1
    assert "could not be checked" in capsys.readouterr().out


def test_a_target_without_devices_is_a_problem(quick, capsys):
    quick(devices={"CPU": 1, "GPU": 0, "Ascend": 0})
    assert main(["doctor", "--target", "Ascend"]) == 1
    assert "no Ascend device is available" in capsys.readouterr().out


def test_results_that_cannot_be_written_are_an_error_of_the_user(quick, tmp_path, capsys):
    quick()
    assert main(["doctor", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("ms-zero: error: --json ")


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        ("ms-zero: error: worker 1 (pid 7) failed first: ValueError: x\nms-zero: last", "worker 1 (pid 7)"),
        ("ms-zero: error: worker 0 failed first: killed by SIGALRM\n", "did not finish in time"),
        ("", "the workers failed"),
    ],
)
def test_failed_workers_are_a_problem_and_their_logs_stay(monkeypatch, tmp_path, reported, found):
    monkeypatch.setattr(doctor_collective.tempfile, "mkdtemp", lambda prefix: str(tmp_path))

    def fail(job, console, errors):
        errors.line(reported)
        return 1

    monkeypatch.setattr(doctor_collective, "run_job", fail)
    check = doctor_collective.check_collective("CPU", 5)
    assert check.status == "problem" and found in check.message
    assert str(tmp_path) in check.fix and tmp_path.is_dir()


def test_an_interrupted_collective_interrupts_the_doctor(quick, monkeypatch, capsys):
    quick(devices={"CPU": 1})
    monkeypatch.setattr(doctor_collective, "run_job", lambda job, console, errors: 130)
    assert main(["doctor"]) == 130


def test_a_worker_that_hangs_is_ended_by_the_kernel():
    code = """
import sys, time, types
comm, selfcheck = types.ModuleType("ms_zero.comm"), types.ModuleType("ms_zero.testing.selfcheck")
comm.connect = lambda target: None
selfcheck.check_collectives = lambda comm: time.sleep(100)
import ms_zero, ms_zero.testing
ms_zero.comm = sys.modules["ms_zero.comm"] = comm
ms_zero.testing.selfcheck = sys.modules["ms_zero.testing.selfcheck"] = selfcheck
from ms_zero.cli import doctor_collective
doctor_collective._main("CPU", 1)
"""
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, timeout=60)
    assert done.returncode == -signal.SIGALRM


def test_two_real_workers_agree(clean, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_collective.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "job"))
    (tmp_path / "job").mkdir()
    check = doctor_collective.check_collective("CPU", 100)
    assert check.status == "ok", check
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring", "exchange"):
        assert name in check.message
    assert not (tmp_path / "job").exists()


def test_the_kernels_that_are_built_are_listed_with_their_processor(monkeypatch, tmp_path):
    variants = native.supported_variants()
    found = [native.Found(tmp_path / f"{each.name}.so", each.name, "cache") for each in variants]
    monkeypatch.setattr(native, "built_libraries", lambda variants: found)
    check = doctor_kernels.check_kernels()[0]
    assert check.status == "ok"
    assert check.message.startswith(f"{variants[0].name}, built at first use ({tmp_path}")
    assert all(each.name in check.message for each in variants)


def test_kernels_that_are_not_built_are_no_problem_with_a_compiler_and_one_without(monkeypatch):
    monkeypatch.setattr(native, "built_libraries", lambda variants: ())
    good = Compiler("/usr/bin/g++", "g++ 12.2", "")
    monkeypatch.setattr(native, "find_compilers", lambda: (good,))
    check = doctor_kernels.check_kernels()[0]
    assert check.status == "ok" and "at first use /usr/bin/g++ (g++ 12.2) builds" in check.message
    bad = Compiler("/usr/bin/g++", "g++ 12.2", "no omp.h")
    cases = ((), "no C++ compiler in PATH"), ((bad,), "/usr/bin/g++ does not work: no omp.h")
    for compilers, reason in cases:
        monkeypatch.setattr(native, "find_compilers", lambda compilers=compilers: compilers)
        check = doctor_kernels.check_kernels()[0]
        assert check.status == "problem" and reason in check.message
        assert check.fix == (
            "install one with OpenMP, for example with 'apt-get install g++'; or run with "
            "hardware.kernels=portable (slower)"
        )


def test_device_kernels_that_are_missing_are_told_with_the_reason(monkeypatch, clean, tmp_path):
    monkeypatch.setattr(doctor_kernels.cuda, "cuda_sources", lambda root: [tmp_path / "x.cu"])
    monkeypatch.setattr(doctor_kernels.cuda, "find_cuda_library", lambda: None)
    monkeypatch.setattr(doctor_kernels.cuda, "find_nvcc", lambda: None)
    _, cuda, ascend = doctor_kernels.check_kernels()
    assert (cuda.status, cuda.message) == ("skipped", "not built: no nvcc was found")
    assert ascend.status == "skipped" and "ASCEND_HOME_PATH is not set" in ascend.message
    monkeypatch.setattr(doctor_kernels.cuda, "find_nvcc", lambda: "/opt/nvcc")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    _, cuda, ascend = doctor_kernels.check_kernels()
    assert cuda.status == "warning" and "MS_ZERO_BUILD_CUDA=1" in cuda.fix
    assert ascend.status == "warning" and "MS_ZERO_BUILD_ASCEND=1" in ascend.fix
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "nowhere"))
    ascend = doctor_kernels.check_kernels()[2]
    assert ascend.status == "skipped" and "nowhere is no folder" in ascend.message


def test_device_kernels_that_are_built_are_listed_with_their_architecture(monkeypatch, tmp_path):
    name = doctor_kernels.cuda.cuda_library_name(REPOSITORY / "ops", ("80",))
    (tmp_path / name).touch()
    config = tmp_path / "ascend" / "vendors" / "ms_zero" / "op_impl" / "ai_core" / "tbe" / "config"
    (config / "ascend910b").mkdir(parents=True)
    for module in (doctor_kernels, doctor_kernels.cuda):
        monkeypatch.setattr(module, "installed_folder", lambda: tmp_path)
    _, cuda, ascend = doctor_kernels.check_kernels()
    assert cuda.message == f"built for sm_80 ({tmp_path / name})"
    assert ascend.message.startswith("built for ascend910b (")

"""The pages in docs/: their programs, files and commands run."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ms_zero.config import load_config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command, cwd):
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "GLOG_v": "3", "OMP_WAIT_POLICY": "passive"}
    environment |= {"HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True)


ENGLISH = sorted(path.name for path in DOCS.glob("*.md") if ".zh-CN." not in path.name)


@pytest.mark.parametrize("page", ENGLISH)
def test_the_chinese_page_has_the_same_code(page):
    twin = page.replace(".md", ".zh-CN.md")
    for language in ("python", "bash", "yaml", "text"):
        assert blocks(page, language) == blocks(twin, language), language
    headings = [len(re.findall(r"^#+ ", (DOCS / name).read_text(), re.MULTILINE)) for name in (page, twin)]
    assert headings[0] == headings[1]


def test_the_own_model_gives_the_same_numbers_alone_and_on_two_workers(tmp_path):
    (program,) = blocks("own-model.md", "python")
    (tmp_path / "own_model.py").write_text(program)
    (commands,) = blocks("own-model.md", "bash")
    printed = []
    for command in commands.splitlines():
        shown = run(command.replace("msrun ", f"msrun --master_port={free_port()} "), tmp_path)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        logs = "".join(path.read_text() for path in tmp_path.glob("logs/worker_*.log"))
        printed.append(re.findall(r"step \d+  loss ([\d.]+)  norm ([\d.]+)", shown.stdout + logs)[:3])
    alone, together = printed
    assert len(alone) == 3
    assert [[float(n) for n in line] for line in alone] == [
        pytest.approx([float(n) for n in line], rel=1e-4) for line in together
    ]
    assert float(alone[-1][0]) < float(alone[0][0])


def test_the_run_files_of_the_page_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(blocks("run-file.md", "yaml")):
        (tmp_path / f"run{number}.yaml").write_text(text)
        load_config(tmp_path / f"run{number}.yaml", world_size=2)


def test_the_commands_of_the_run_file_page_run(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "my-run.yaml").write_text(blocks("run-file.md", "yaml")[0])
    commands = [line for block in blocks("run-file.md", "bash") for line in block.splitlines()]
    assert commands
    for command in commands:
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"


def test_the_commands_of_the_translation_page_run(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "ds_config.json").write_text(blocks("translate.md", "json")[0])
    for name, text in zip(("accelerate.yaml", "pretrain.yaml"), blocks("translate.md", "yaml"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "pretrain.sh").write_text(blocks("translate.md", "text")[1])
    printed = ""
    for command in [line for block in blocks("translate.md", "bash") for line in block.splitlines()]:
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"
        printed += shown.stdout
    for line in blocks("translate.md", "text")[0].splitlines():
        assert line in printed.splitlines()
    assert '"reduce_bucket_size": 500000000' in (tmp_path / "back.json").read_text()


def test_the_program_of_the_translation_page_runs(capsys):
    (program,) = blocks("translate.md", "python")
    exec(compile(program, "translate.md", "exec"), {})
    assert capsys.readouterr().out == "8 3 4\n64 6\n"


def test_the_run_files_and_commands_of_the_zero_page_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, text in zip(("zero3.yaml", "offloaded.yaml"), blocks("zero.md", "yaml"), strict=True):
        (tmp_path / name).write_text(text)
        load_config(tmp_path / name, world_size=2)
    printed = ""
    for command in [line for block in blocks("zero.md", "bash") for line in block.splitlines()]:
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"
        printed += shown.stdout
    for line in blocks("zero.md", "text")[0].splitlines():
        assert line in printed.splitlines()


def test_the_program_of_the_zero_page_runs(tmp_path):
    (program,) = blocks("zero.md", "python")
    (tmp_path / "program.py").write_text(program)
    shown = run(f"{sys.executable} program.py", tmp_path)
    assert "learns: True" in shown.stdout, shown.stdout + shown.stderr
    # Half of the master weights and moments of 161 parameters, up to the rounding of each bucket.
    assert abs(int(shown.stdout.split("device: ")[1].split()[0]) - 161 * 12 / 2) < 100


def test_the_run_file_schedule_and_commands_of_the_parallel_page_work(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    names = ("context.yaml", "experts.yaml", "pipeline.yaml")
    for name, text in zip(names, blocks("parallel.md", "yaml"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "swapped.csv").write_text(blocks("parallel.md", "text")[0])
    lines = [line for block in blocks("parallel.md", "bash") for line in block.splitlines()]
    for command in (line for line in lines if line.startswith("ms-zero")):
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"


def test_the_chain_of_the_parallel_page_gives_the_same_numbers_alone_and_on_two_workers(tmp_path):
    (program,) = blocks("parallel.md", "python")
    (tmp_path / "chain.py").write_text(program)
    printed = []
    for command in blocks("parallel.md", "bash")[-1].splitlines():
        shown = run(command.replace("msrun ", f"msrun --master_port={free_port()} "), tmp_path)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        logs = "".join(path.read_text() for path in tmp_path.glob("logs/worker_*.log"))
        found = re.findall(r"step \d+  loss ([\d.]+)  norm ([\d.]+)", shown.stdout + logs)
        printed.append(np.array(found[:2], float))
    np.testing.assert_allclose(*printed, rtol=1e-4)
    assert printed[0][1][0] < printed[0][0][0]


def test_the_run_file_commands_and_program_of_the_page_on_experts_work(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "mixture.yaml").write_text(blocks("moe.md", "yaml")[0])
    load_config(tmp_path / "mixture.yaml", world_size=2)
    for command in blocks("moe.md", "bash")[0].splitlines():
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"
    (tmp_path / "program.py").write_text(blocks("moe.md", "python")[0])
    shown = run(f"{sys.executable} program.py", tmp_path)
    assert shown.stdout.startswith("learns: True  balance 1."), shown.stdout + shown.stderr


def test_the_run_file_and_commands_of_the_graph_page_work(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (yaml,) = blocks("graph.md", "yaml")
    (tmp_path / "graph.yaml").write_text(yaml)
    losses = []
    for command in blocks("graph.md", "bash")[0].splitlines():
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"
        losses += re.findall(r"(\d+)/\d .* loss ([\d.]+)", shown.stdout)
    assert [step for step, _ in losses] == ["1", "2", "3", "4", "5"]  # the second run has resumed
    assert float(losses[-1][1]) < float(losses[0][1])


def test_the_program_of_the_graph_page_prints_the_same_on_two_workers_and_no_deprecation(tmp_path):
    (program,) = blocks("graph.md", "python")
    (tmp_path / "own_graph.py").write_text(program)
    printed = []
    for command in blocks("graph.md", "bash")[1].splitlines():
        # At level 2 MindSpore warns of what it deprecates.
        command = command.replace("msrun ", f"msrun --master_port={free_port()} ")
        shown = run(f"export GLOG_v=2; {command}", tmp_path)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        logs = "".join(path.read_text() for path in tmp_path.glob("logs/worker_*.log"))
        assert "deprecat" not in (shown.stdout + shown.stderr + logs).lower()
        printed.append(re.findall(r"step \d+  loss [\d.]+  norm [\d.]+", shown.stdout + logs)[:3])
    assert len(printed[0]) == 3 and printed[0] == printed[1]


def test_the_run_file_and_commands_on_orders_of_the_compiler_work(tmp_path):
    (tmp_path / "orders.yaml").write_text(blocks("auto-parallel.md", "yaml")[1])
    commands = next(each for each in blocks("auto-parallel.md", "bash") if "orders.yaml" in each)
    for command in commands.splitlines():
        shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"


def test_the_run_file_and_the_command_on_experts_show_all_to_alls(tmp_path):
    (tmp_path / "experts.yaml").write_text(blocks("auto-parallel.md", "yaml")[2])
    (command,) = (each for each in blocks("auto-parallel.md", "bash") if "experts.yaml" in each)
    shown = run(command.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
    if "known for" not in shown.stderr:  # another version of MindSpore
        assert re.search(r"AlltoAll +ep ", shown.stdout), shown.stdout + shown.stderr


def test_the_program_and_the_commands_on_models_of_ones_own_under_autoparallel_work(tmp_path):
    (program,) = blocks("auto-parallel.md", "python")
    (tmp_path / "own_parallel.py").write_text(program)
    (commands,) = (block for block in blocks("auto-parallel.md", "bash") if "own_parallel" in block)
    train, inspect = commands.splitlines()
    shown = run(train, tmp_path)
    losses = [float(loss) for loss in re.findall(r"step \d+  loss ([\d.]+)", shown.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0], shown.stdout + shown.stderr
    shown = run(inspect.replace("ms-zero", f"{sys.executable} -m ms_zero"), tmp_path)
    if "known for" not in shown.stderr:  # another version of MindSpore
        assert "rank 0 of 4 ranks: dp_shard 2 x tp 2" in shown.stdout, shown.stdout + shown.stderr
        assert re.search(r"AllReduce +tp ", shown.stdout)

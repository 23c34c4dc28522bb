"""The harness itself, on a network of two products, and what it says when it cannot work."""

import importlib.metadata
import json
import re
import shlex
from pathlib import Path

import pytest

from ms_zero import _compat_frontend
from ms_zero.cli.main import main
from ms_zero.graph.frontend import Case, FrontEndError, FrontEndUnavailable, compile_case
from ms_zero.graph.ir import parse

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 900.0


def compile_tiny(function, **arguments):
    try:
        return compile_case(
            Case(f"{HERE / 'tiny_network.py'}:{function}", arguments, size=8), timeout_s=TIMEOUT_S
        )
    except FrontEndUnavailable as reason:
        pytest.skip(str(reason))


def test_a_row_parallel_product_scatters_and_gradients_are_summed_over_data_ranks():
    graph = compile_tiny("two_products").graph
    assert graph.number("ReduceScatter", role="layout", phase="forward", ranks=(0, 1)) == 1
    assert graph.number("AllGather", role="layout", phase="backward", ranks=(0, 1)) == 1
    gradients = graph.select("AllReduce", role="gradient")
    assert [each.ranks for each in gradients] == [(0, 2, 4, 6)] * 2
    assert sorted(each.parameter for each in gradients) == ["w", "w2"]
    assert gradients[0].bytes_sent == 2 * 3 / 4 * 64 * 64 * 4
    assert graph.parameters["w"].shape == (64, 64)


def test_a_wrong_strategy_is_an_error_of_the_compiler():
    with pytest.raises(FrontEndError) as refused:
        compile_tiny("two_products", rows=3)
    assert "\n" not in refused.value.reason
    assert "Error: " in refused.value.reason


def test_what_the_compiler_refuses_is_one_line_of_the_command(monkeypatch, capsys):
    def refuse(*_, **__):
        raise FrontEndError("Traceback\n  many lines", "RuntimeError: no such strategy")

    monkeypatch.setattr("ms_zero.cli.graph.compile_case", refuse)
    assert main(["graph", "inspect", "runs/quickstart", "--workers", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "compiler refuses the step of rank 0: RuntimeError: no such strategy; change the degrees" in line


@pytest.mark.parametrize("option", ["--keep", "--json"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_compiled(
    option, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("ms_zero.cli.graph.compile_case", lambda *_, **__: pytest.fail("compiled"))
    for path in (tmp_path, tmp_path / "no" / "folder.json"):
        assert main(["graph", "inspect", "runs/quickstart", option, str(path)]) == 2
        assert f"{option} {path}: cannot write this file" in capsys.readouterr().err


def test_another_version_is_refused_with_its_number(monkeypatch):
    monkeypatch.setattr(_compat_frontend.mindspore, "__version__", "2.11.0")
    assert "2.11.0" in _compat_frontend.unavailable_reason()


def test_a_missing_hook_is_told(monkeypatch):
    if importlib.metadata.version("mindspore") != _compat_frontend.CHECKED_VERSION:
        pytest.skip("another version")
    monkeypatch.setattr(_compat_frontend, "_comm_helper", None)  # as where it cannot be imported
    assert "_comm_helper" in _compat_frontend.unavailable_reason()
    monkeypatch.setattr(_compat_frontend, "_SETTER", "no_such_symbol")
    assert "not there" in _compat_frontend.unavailable_reason()


def test_subgraphs_count_as_often_as_they_are_called():
    text = """# IR entry: @main
subgraph @fwd(%para1_x) {
  %1(a) = AllGather(%para1_x) {instance name: parallel_optimizer_x} primitive_attrs: {group_rank_ids: (0, 1)}
      : (<Tensor[Float32], (2, 4)>) -> (<Tensor[Float32], (4, 4)>)
      # Fullname with scope: (Default/AllGather-op0)
}
subgraph @main() {
  %0(y) = call @fwd(%para0_x)
      : (<null>) -> (<null>)
  %1(z) = %0[@Partial(@fwd)](UMonad[U])
      : (<null>) -> (<null>)
}
"""
    (operation,) = parse(text).operations
    assert (operation.times, operation.role, operation.bytes_sent) == (2, "weight", 32.0)


def test_the_run_file_and_command_of_the_page_work(tmp_path, monkeypatch, capsys):
    # Skips where MindSpore is another version. What MindSpore logs of old API is seen.
    warned = compile_tiny("two_products", old_api=True).deprecations()
    assert any("save_graphs" in line for line in warned)
    text = (HERE.parents[1] / "docs" / "auto-parallel.md").read_text()
    run_file, *_ = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    command, *_ = re.findall(r"^```bash\nms-zero (.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sharded.yaml").write_text(run_file)
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert "rank 0 of 4 ranks: dp_shard 2 x tp 2" in printed
    report = json.loads((tmp_path / "sharded.json").read_text())
    scattered = [each for each in report["operations"] if each["name"] == "ReduceScatter"]
    assert {tuple(each["ranks"]) for each in scattered} == {(0, 1), (0, 2), (0, 1, 2, 3)}

"""The quick part of the parity cases of context parallelism, and what the whole covers."""

from pathlib import Path

from ms_zero.testing.context_matrix import PROBLEMS, context_cases
from ms_zero.testing.parity import Plan, run_cases


def test_the_quick_cases_train_like_one_process(tmp_path):
    results = list(run_cases(context_cases(quick=True, scratch=tmp_path), Plan(steps=3)))
    assert len(results) == 8
    assert [f"{result.case.name}: {result.divergence}" for result in results if result.divergence] == []


def test_the_cases_cover_methods_degrees_stages_and_the_other_axes(tmp_path):
    cases = context_cases(quick=False, scratch=Path(tmp_path))
    assert len({case.name for case in cases}) == len(cases) >= 100
    configs = [case.config() for case in cases]
    for method in ("ring", "ulysses"):
        mine = [config.parallel for config in configs if config.parallel.context == method]
        assert {parallel.cp for parallel in mine} == {2, 3, 4}
        assert {(p.cp, p.zero_stage) for p in mine if p.dp_shard > 1} >= {(2, 0), (2, 2), (2, 3), (4, 3)}
        assert {p.sequence_parallel for p in mine if p.tp > 1} == {False, True}
        assert any(p.pp > 1 and p.tp > 1 for p in mine) and any(p.pp > 1 and p.dp_shard > 1 for p in mine)
    llamas = [config for config in configs if config.model.family == "llama"]
    assert any(config.model.num_kv_heads < config.parallel.cp for config in llamas) and len(PROBLEMS) == 5
    assert {config.data.reset_attention for config in configs} == {False, True}

"""The quick part of the parity cases of tensor parallelism, and what the whole covers."""

from ms_zero.testing.parity import Plan, run_cases
from ms_zero.testing.tensor_matrix import PROBLEMS, tensor_cases


def test_the_quick_cases_train_like_one_process():
    results = list(run_cases(tensor_cases(quick=True), Plan(steps=3)))
    assert len(results) == 7
    assert [str(result.divergence) for result in results if result.divergence] == []


def test_the_cases_cover_degrees_stages_and_both_forms_of_the_sequence():
    cases = tensor_cases(quick=False)
    assert len({case.name for case in cases}) == len(cases) >= 40
    configs = [case.config() for case in cases]
    layouts = {(c.parallel.tp, c.parallel.sequence_parallel, c.parallel.zero_stage) for c in configs}
    assert {(2, cut, stage) for cut in (False, True) for stage in range(4)} <= layouts
    assert {(tp, cut, 0) for cut in (False, True) for tp in (3, 4)} <= layouts
    assert {c.model.family for c in configs} == {"gpt", "llama"} and len(PROBLEMS) == 4
    assert any(c.model.vocab_size % c.parallel.tp for c in configs)
    assert any(c.model.family == "llama" and c.model.num_kv_heads < c.parallel.tp for c in configs)

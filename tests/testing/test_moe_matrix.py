"""The quick part of the parity cases of models with experts, all on every rank, and what the whole covers."""

from ms_zero.testing.expert_matrix import moe_cases
from ms_zero.testing.parity import Plan, run_cases


def test_the_quick_cases_train_like_one_process():
    results = list(run_cases(moe_cases(quick=True), Plan(steps=2, gradient_step=1)))
    assert len(results) == 6
    assert [str(result.divergence) for result in results if result.divergence] == []


def test_the_cases_cover_stages_precisions_recompute_and_routers():
    cases = moe_cases(quick=False)
    assert len({case.name for case in cases}) == len(cases) >= 30
    configs = [case.config() for case in cases]
    models = {(c.model.router, c.model.latent is not None, c.model.capacity_factor) for c in configs}
    assert models == {("softmax", False, None), ("softmax", False, 1.25), ("sigmoid", True, None)}
    assert {(c.precision.policy, c.parallel.zero_stage) for c in configs} >= {
        (policy, stage) for policy in ("fp32", "bf16", "fp16") for stage in range(4)
    }
    assert {c.memory.recompute for c in configs} == {"none", "full", "sqrt", "selective"}
    assert any(c.parallel.pp > 1 for c in configs) and any(c.parallel.wrap == "size" for c in configs)

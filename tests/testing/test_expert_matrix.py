"""The quick part of the parity cases of expert parallelism, and what the whole covers."""

from ms_zero.testing.expert_matrix import expert_cases
from ms_zero.testing.parity import Plan, run_cases


def test_the_quick_cases_train_like_one_process():
    results = list(run_cases(expert_cases(quick=True), Plan(steps=3)))
    assert len(results) == 6
    assert [str(result.divergence) for result in results if result.divergence] == []


def test_the_cases_cover_degrees_copies_stages_and_the_other_axes():
    cases = expert_cases(quick=False)
    assert len({case.name for case in cases}) == len(cases) >= 30
    configs = [case.config() for case in cases]
    layouts = [config.parallel for config in configs]
    copies = {(p.ep, p.dp_shard // p.ep, p.zero_stage) for p in layouts}
    assert {(2, 2, stage) for stage in range(1, 4)} <= copies
    assert {2, 3, 4} <= {p.ep for p in layouts}
    assert {p.zero_stage for p in layouts if p.dp_replicate == 2 and p.ep == 2} == {0, 1, 2, 3}
    assert {p.schedule for p in layouts if p.pp == 2} == {"gpipe", "1f1b", "interleaved", "zb-h1"}
    assert {(p.tp, p.sequence_parallel) for p in layouts if p.ep > 1} == {(1, False), (2, False), (2, True)}
    assert any(p.pp == p.tp == p.ep == 2 for p in layouts)
    assert {(p.ep, p.context) for p in layouts if p.cp == 2} >= {(1, "ulysses"), (2, "ring"), (4, "ring")}
    assert {config.model.router for config in configs} == {"softmax", "sigmoid"}
    assert any(config.model.capacity_factor for config in configs)
    assert {config.optim.clip_norm > 0 for config in configs} == {False, True}

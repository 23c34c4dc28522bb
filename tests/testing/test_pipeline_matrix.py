"""What the parity cases of pipelines cover; tests/recipes/test_pipeline.py trains the quick ones."""

from ms_zero.pipeline import schedule as schedules
from ms_zero.plan.run import stage_layers
from ms_zero.testing.pipeline_matrix import pipeline_cases


def test_the_cases_cover_stages_schedules_zero_and_stages_without_parameters():
    cases = pipeline_cases(quick=False)
    assert len({case.name for case in cases}) == len(cases) >= 60
    configs = [case.config() for case in cases]
    layouts = [config.parallel for config in configs if config.parallel.pp > 1]
    assert {layout.pp for layout in layouts} == {2, 3, 4, 8}
    assert {layout.schedule for layout in layouts} == set(schedules.NAMES)
    assert {layout.stage_balance for layout in layouts} == {"parameters", "time"}
    assert {p.zero_stage for p in layouts if p.dp_shard > 1} == {0, 1, 2, 3}
    assert any(p.pp == p.tp == p.dp_shard == 2 for p in layouts)
    assert any(config.train.accumulation_steps < config.parallel.pp for config in configs)
    held = [
        (config, stage_layers(config, config.parallel.pp * config.parallel.virtual_stages))
        for config in configs
        if config.parallel.pp > 1
    ]
    more = [config for config, counts in held if len(counts) > config.model.num_layers]
    assert {config.parallel.schedule for config in more} == set(schedules.NAMES)
    assert {config.model.tie_embeddings for config in more} == {False, True}
    empty = [(config, counts) for config, counts in held if 0 in counts]
    sharded = [config.parallel for config, _ in empty if config.parallel.dp_shard > 1]
    assert {layout.zero_stage for layout in sharded} == {0, 1, 2, 3}
    assert any(counts[0] == 0 for _, counts in empty) and any(counts[-1] == 0 for _, counts in empty)
    assert any(0 in counts[1:-1] for _, counts in empty)

"""What a run file asks of AutoParallel; nothing is compiled."""

import json

import pytest
from front_end_cases import config_of

from ms_zero.errors import UserError
from ms_zero.graph.parallel import options_of
from ms_zero.graph.strategies import Grid


def test_axes_become_a_grid_with_tp_fastest():
    options = options_of(config_of(16, "parallel.tp=2", "parallel.cp=2", "parallel.dp_replicate=2"))
    assert options.grid == Grid(dp=4, cp=2, tp=2)
    layout = options.grid.layout(("dp", "cp"), "tp").to_dict()
    assert (layout["device_matrix"], layout["tensor_map"]) == ((4, 2, 2), ((2, 1), 0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_become_levels(stage):
    assert options_of(config_of(4, f"parallel.zero_stage={stage}")).hsdp_level == stage


def test_only_replicas_limit_the_ranks_that_share_a_parameter():
    whole = options_of(config_of(8, "parallel.zero_stage=1"))
    assert whole.shard_size == -1
    cut = options_of(config_of(8, "parallel.zero_stage=1", "parallel.dp_replicate=2"))
    assert cut.shard_size == 4


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", ("1f1b", False)), ("gpipe", ("gpipe", True)), ("interleaved", ("1f1b", True))],
)
def test_schedules_by_the_names_of_mindspore(schedule, expected):
    virtual = ["parallel.virtual_stages=2"] if schedule == "interleaved" else []
    overrides = ["parallel.pp=2", "model.num_layers=4", "train.accumulation_steps=4", *virtual]
    stages = options_of(config_of(2, f"parallel.schedule={schedule}", *overrides)).stages
    assert (stages.scheduler, stages.interleave) == expected
    assert sum(stages.chunk_layers) == 4


@pytest.mark.parametrize(
    ("layers", "keys", "expected"),
    [(6, (), (1, 2, 2, 1)), (8, (), (2, 2, 2, 2)), (6, ("parallel.stage_layers=[3,1,1,1]",), (3, 1, 1, 1))],
)
def test_layers_are_balanced_with_the_ends_unless_the_run_says_so(layers, keys, expected):
    overrides = ("parallel.pp=4", "train.accumulation_steps=4", f"model.num_layers={layers}")
    config = config_of(4, *overrides, *keys)
    assert options_of(config).stages.chunk_layers == expected


@pytest.mark.parametrize("keys", [["[3,0,2,1]"], ["[0,2,2,2]", "parallel.schedule=seqpipe"]])
def test_stages_without_layers_are_refused(keys):
    overrides = ("parallel.pp=4", "model.num_layers=6", "train.accumulation_steps=4")
    with pytest.raises(UserError, match="at least one"):
        options_of(config_of(4, *overrides, f"parallel.stage_layers={keys[0]}", *keys[1:]))


def test_recompute_by_block():
    options = options_of(config_of(2, "model.num_layers=4", "memory.recompute=every_k"))
    assert options.recompute == ("full", "none", "full", "none")


def test_overlaps_follow_from_what_is_cut():
    plain = options_of(config_of(2)).speed_up
    assert plain["grad_computation_allreduce_overlap"] and not plain["grad_matmul_communication_overlap"]
    cut = options_of(config_of(4, "parallel.tp=2", "parallel.zero_stage=1", "memory.recompute=full")).speed_up
    wanted = ("recomputation_communication_overlap", "grad_matmul_communication_overlap")
    assert all(cut[name] for name in (*wanted, "computation_allgather_overlap"))
    assert json.loads(json.dumps(cut)) == cut


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pp=2", "parallel.schedule=zb-h1", "model.num_layers=2"], "has no order zb-h1"),
        (["parallel.zero_stage=3", "parallel.reshard_after_forward=false"], "frees weights after forward"),
        (["parallel.zero_stage=1", "parallel.sync_each_microbatch=true"], "leave it on auto"),
        (["parallel.cp=2", "precision.policy=fp32"], "takes 16 bits"),
        (["model.head_dim=24"], "multiples of 16"),
        (["precision.reduce=bf16"], "leave reduce"),
        (["model.dropout=0.1"], "drawn on the host"),
        (["memory.activations=int8"], "kept exactly"),
        (["offload.optimizer=cpu"], "sgd has no state"),
    ],
)
def test_what_autoparallel_does_not_do_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        options_of(config_of(2, "train.accumulation_steps=4", *overrides))

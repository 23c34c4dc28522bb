"""Training with expert parallelism: other layouts, balancing, traffic and memory, a model of one's own."""

from dataclasses import replace

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_zero import zero
from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import ProcessMesh, checked, local
from ms_zero.config import load_config
from ms_zero.data.run import load_data
from ms_zero.kernels import default_target
from ms_zero.mesh import Mesh
from ms_zero.models.init import init_rules, initial_values
from ms_zero.models.layers import name_parameters_by_path
from ms_zero.models.moe import Mixture, MoE
from ms_zero.models.routing import Rules
from ms_zero.optim import AdamW
from ms_zero.parallel import split_experts
from ms_zero.plan.memory import state_bytes
from ms_zero.plan.parameters import device_embedding_parameters, device_layer_parameters
from ms_zero.plan.run import layout_of
from ms_zero.plan.shapes import from_config
from ms_zero.plan.traffic import router_bytes, step_bytes
from ms_zero.recipes.account import account, sent_bytes
from ms_zero.runner import build_trainer
from ms_zero.testing import run_workers

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.expert_ffn_hidden_size=24",
    "model.shared_ffn_hidden_size=16",
    "model.num_experts=8",
    "data.seq_len=16",
    "train.global_batch_size=8",
    "train.accumulation_steps=1",
    "train.eval_interval=0",
    "optim.warmup_steps=1",
    "parallel.zero_stage=0",
)
BIAS = "model.layers.1.mlp.router.bias"
EP = ("parallel.ep=2",)
DROPS = ("model.capacity_factor=1.1", "model.z_coefficient=0.01", "model.balance_coefficient=0.1")
HALVES = (
    ("precision.policy=fp16", "precision.initial_scale=256", "parallel.zero_stage=3"),
    ("precision.policy=bf16", "parallel.zero_stage=1"),
)
LAYOUTS = (
    ("parallel.ep=4", "parallel.zero_stage=3"),
    ("parallel.zero_stage=1",),
    (*EP, "parallel.tp=2", "parallel.zero_stage=3"),
    (*EP, "parallel.pp=2", "train.accumulation_steps=2"),
    (*EP, "parallel.dp_replicate=2", "parallel.zero_stage=2"),
)


def trainer_of(comm, *overrides):
    config = load_config("runs/deepseek-tiny", [*SMALL, *overrides], comm.world_size).config
    return build_trainer(config, load_data(config), comm), config


def steps(trainer, count):
    return [[result.loss, result.grad_norm] for result in (trainer.step() for _ in range(count))]


def bias_of(trainer):
    kept = trainer.engine.sharded.kept
    return kept[BIAS].asnumpy().tolist() if BIAS in kept else None


def resumed(comm, root):
    """Two steps in one layout, saved, and two more there and in each of the others."""
    first, _ = trainer_of(comm, *EP, "parallel.zero_stage=1")
    begun = steps(first, 2)
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shards = first.engine.state_shards()
    path = save(root, 2, shards, {}, exchange=comm.exchange, barrier=comm.barrier, **ranks)
    progress, bias = replace(first.progress), bias_of(first)
    begun += steps(first, 2)
    others = []
    for layout in LAYOUTS:
        other, _ = trainer_of(comm, *layout)
        other.engine.load_state(open_checkpoint(path))
        loaded = bias_of(other)
        other.progress = replace(progress)
        other.engine.optimizer.num_updates = progress.updates
        others.append([steps(other, 2), loaded, bias_of(other)])
    return {"path": str(path), "begun": begun, "bias": [bias, bias_of(first)], "others": others}


def balancing(comm):
    """The bias after a step: plain, recomputed, after an evaluation, and when the step is skipped."""
    found = {}
    for name, overrides in (("plain", ()), ("recomputed", ("memory.recompute=full",))):
        trainer, _ = trainer_of(comm, *EP, *overrides)
        steps(trainer, 1)
        found[name] = bias_of(trainer)
    trainer, config = trainer_of(comm, *EP)
    trainer.evaluate(load_data(config).validation_loader(), 8)
    steps(trainer, 1)
    found["evaluated"] = bias_of(trainer)
    trainer, _ = trainer_of(comm, *EP, "precision.policy=fp16", "precision.initial_scale=1e30")
    result = trainer.step()
    found["skipped"] = [result.nonfinite is not None, bias_of(trainer)]
    return found


def in_16_bits(comm):
    """Losses and norms under the policies; what ranks do together is compared between them beforehand."""
    found = []
    with checked(comm) as debug:
        for overrides in HALVES:
            trainer, _ = trainer_of(debug, *overrides, *(EP if comm.world_size > 1 else ()))
            found.append(steps(trainer, 3))
    return found


def accounts(comm):
    """What a step sends and holds, beside the theory and the planner."""
    found = []
    for stage in range(4):
        for more in ((), ("parallel.dp_replicate=2",)) if stage else ((),):
            layout = ("train.accumulation_steps=2", f"parallel.zero_stage={stage}", *more)
            trainer, config = trainer_of(comm, *EP, *layout)
            steps(trainer, 1)
            sharded, before = trainer.engine.sharded, sent_bytes(comm.counters, trainer.engine.sharded)
            steps(trainer, 1)
            sent = sent_bytes(comm.counters, sharded) - before
            made = account(sharded, trainer.engine.optimizer, sent=sent, num_microbatches=2)
            layout, shape = layout_of(config), from_config(config.model)
            parts = [
                device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=1, ep=layout.ep)
                for layer in shape.layers()
            ]
            ends = 2 * device_embedding_parameters(shape, tp=1) + shape.hidden_size
            dense, experts = sum(part.dense for part in parts) + ends, sum(part.experts for part in parts)
            planned, _ = state_bytes(layout, dense, experts)
            traffic = step_bytes(shape, layout, dense + experts)["dp"]
            held = [made.held, made.held_theory, sum(planned.values())]
            found.append([made.sent, made.sent_theory, traffic, *held])
    return found


def dispatched(comm):
    """Bytes of the all-to-alls of a step, plain and recomputed, beside the planner's."""
    found = []
    for recompute in ("none", "full"):
        trainer, config = trainer_of(comm, "parallel.ep=4", f"memory.recompute={recompute}")
        before = comm.counters.total_bytes(op="all_to_all")
        steps(trainer, 1)
        sent = comm.counters.total_bytes(op="all_to_all") - before
        shape = from_config(config.model)
        found.append([sent, step_bytes(shape, layout_of(config), 0.0)["ep"]])
    return found


def gathered_logits(comm):
    """Bytes of the logits that context-parallel ranks gather, plain and recomputed, and predicted."""
    found = []
    for recompute in ("none", "full"):
        layout = ("parallel.cp=2", "parallel.ep=4", f"memory.recompute={recompute}")
        trainer, config = trainer_of(comm, *layout)
        before = comm.counters.total_bytes(op="all_gather", group="cp")
        steps(trainer, 1)
        sent = comm.counters.total_bytes(op="all_gather", group="cp") - before
        found.append([sent, router_bytes(config.model.num_experts, layout_of(config))])
    return found


class Own(nn.Cell):
    """A user's model: two layers of experts."""

    def __init__(self):
        super().__init__()
        mixture = Mixture(num_experts=4, ffn_hidden_size=6, rules=Rules(top_k=2, balance_coefficient=0.1))
        self.scale = Parameter(Tensor(np.full(8, 1.5, np.float32)))
        options = {"init_std": 0.5, "residual_std": 0.5, "target": None}
        self.layers = nn.CellList([MoE(8, mixture, **options) for _ in range(2)])
        name_parameters_by_path(self)

    def construct(self, x):
        x, total = x * self.scale, 0.0
        for layer in self.layers:
            y, aux = layer(x)
            x, total = x + y, total + aux.mean()
        return x, total


def own_model(comm, stage, ep, with_values=False, count=3):
    """The whole parameters after some steps."""
    mesh = ProcessMesh(Mesh(dp_shard=comm.world_size, ep=ep), comm)
    cell = Own()
    rules = init_rules(cell.layers)
    shapes = {name: tuple(param.shape) for name, param in cell.parameters_and_names()}

    def values(name, start, stop):
        if name == "scale":
            return np.full(stop - start, 1.5, np.float32)
        return initial_values(rules[name.removeprefix("layers.")], name, shapes[name], 3, start, stop)

    if with_values:
        for name, param in cell.parameters_and_names():
            param.data = Tensor(values(name, 0, int(np.prod(shapes[name]))).reshape(shapes[name]))
    placements = split_experts(cell, cell.layers, comm, mesh.group("ep"))
    model = zero.shard(
        cell, mesh, stage=stage, placements=placements, values=None if with_values else values
    )
    whole = {name: value.copy() for name, value in model.state_dict().items()}
    model.load_state_dict(whole)
    optimizer = AdamW(model, eps=1e-4)
    rows = np.random.default_rng(9).standard_normal((8, 5, 8)).astype(np.float32)
    share = 8 // comm.world_size
    x = Tensor(rows[comm.rank * share :][:share].copy())
    for _ in range(count):
        with model.record():
            y, aux = model(x)
            loss = (y * y).mean() + aux
        model.backward(loss)
        optimizer.step(lr=1e-2, clip_norm=0.5)
    return {name: value.reshape(-1).tolist() for name, value in model.state_dict().items()}


def by_operators_of_devices(comm):
    """Losses, norms and the bias after two steps with the kernels that a GPU gets; they run on CPU too."""
    found = []
    with default_target("GPU"):
        for layout in (("parallel.zero_stage=3", "memory.recompute=full"), ("parallel.cp=2",)):
            trainer, _ = trainer_of(comm, *EP, *layout, *DROPS)
            found.append([steps(trainer, 2), bias_of(trainer)])
    return found


def job(comm, root):
    return {
        "by_operators_of_devices": by_operators_of_devices(comm),
        "resumed": resumed(comm, root),
        "balancing": balancing(comm),
        "in_16_bits": in_16_bits(comm),
        "accounts": accounts(comm),
        "dispatched": dispatched(comm),
        "gathered": gathered_logits(comm),
        "own": [own_model(comm, *case) for case in ((0, 4), (3, 2), (2, 2, True))],
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_workers(4, job, str(tmp_path_factory.mktemp("state")), timeout_s=500)


def test_a_checkpoint_goes_on_in_any_other_layout(reports):
    found = reports[0]["resumed"]
    for number, layout in enumerate(LAYOUTS):
        for report in reports:
            history, loaded, moved = report["resumed"]["others"][number]
            np.testing.assert_allclose(history, found["begun"][2:], rtol=5e-6, err_msg=str(layout))
            if loaded is not None:  # this rank's stage has the router
                assert [loaded, moved] == found["bias"]
    single, _ = trainer_of(local())
    single.engine.load_state(open_checkpoint(found["path"]))
    single.progress = replace(single.progress, step=2, updates=2, consumed_samples=16)
    single.engine.optimizer.num_updates = 2
    np.testing.assert_allclose(steps(single, 2), found["begun"][2:], rtol=5e-6)
    assert bias_of(single) == found["bias"][1]


def test_biases_follow_the_load_of_applied_steps_alone(reports):
    single, _ = trainer_of(local())
    steps(single, 1)
    expected = bias_of(single)
    assert set(np.abs(np.float32(expected)).tolist()) <= {0.0, float(np.float32(0.01))} != {0.0}
    for report in reports:
        found = report["balancing"]
        assert found["plain"] == found["recomputed"] == found["evaluated"] == expected
        assert found["skipped"] == [True, [0.0] * 8]


def test_routing_and_sorting_by_operators_of_devices_train_alike(reports):
    single, _ = trainer_of(local(), *DROPS)
    expected = steps(single, 2)
    for found, bias in (layout for report in reports for layout in report["by_operators_of_devices"]):
        np.testing.assert_allclose(found, expected, rtol=5e-6)
        assert bias == bias_of(single)


def test_it_trains_in_16_bits_like_one_process(reports):
    expected = in_16_bits(local())
    for report in reports:
        np.testing.assert_allclose(report["in_16_bits"], expected, rtol=5e-3)


def test_states_of_experts_are_sharded_among_the_ranks_that_hold_the_same(reports):
    for report in reports:
        for sent, sent_theory, planned_sent, held, held_theory, planned in report["accounts"]:
            assert sent == pytest.approx(sent_theory, rel=0.02)
            assert sent == pytest.approx(planned_sent, rel=0.02)
            assert held == pytest.approx(held_theory, rel=0.02)
            assert held == pytest.approx(planned, rel=0.02)


def test_all_to_alls_send_what_the_planner_says_and_half_as_much_again_when_recomputed(reports):
    plain, recomputed = (np.array([report["dispatched"][number] for report in reports]) for number in (0, 1))
    counts = 4 * 8 * 3 / 4  # a number for each expert, once a forward of the one layer with experts
    assert plain[:, 0].sum() - 4 * counts == pytest.approx(plain[:, 1].sum(), rel=0.1)  # uneven experts
    assert recomputed[:, 0].sum() == 1.5 * (plain[:, 0].sum() - 4 * counts) + 8 * counts
    assert (recomputed[:, 1] == 1.5 * plain[:, 1]).all()


def test_context_parallel_ranks_gather_the_logits_of_routers(reports):
    for report in reports:
        plain, recomputed = report["gathered"]
        assert plain[0] == plain[1] == 4 * 8 * 8 * 4  # half of 16 tokens of 4 samples, 8 experts, fp32
        assert recomputed == [2 * plain[0]] * 2


@pytest.mark.parametrize("number", range(3))
def test_a_model_of_ones_own_is_split_and_sharded(reports, number):
    expected = own_model(local(), 0, 1)
    for report in reports:
        found = report["own"][number]
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)

"""Builds the graphs of the engine as a rank of an Ascend job has them; used by test_step_front_end.py."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_zero.comm import Group
from ms_zero.config import load_config
from ms_zero.graph.dropout import GivenMasks
from ms_zero.graph.inspected import declared_model
from ms_zero.graph.network import LossNetwork
from ms_zero.graph.precision import compute_in
from ms_zero.graph.step import GraphStep
from ms_zero.graph.train import build_update, trained_parameters

RATES = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def build(graph, preset, overrides, size):
    config = load_config(preset, [*overrides, "parallel.zero_stage=0"], size, to_run=False).config
    model = declared_model(config.model)
    compute_in(model, ms.bfloat16, target="Ascend")
    update = build_update(config.optim, model, trained_parameters(model), "Ascend")
    if config.model.dropout:
        GivenMasks(model, 1, (2, config.data.seq_len, config.model.hidden_size))
    group = Group("dp", tuple(range(size)), 0, "hccl_world_group")
    network = LossNetwork(model)
    step = GraphStep(network, update, group=group, bucket_bytes=2**20, target="Ascend", **RATES)
    ids = Tensor(np.zeros((2, config.data.seq_len), np.int32))
    scalars = Tensor(np.zeros(16, np.float32))
    inputs = {"microbatch": (ids, ids), "end": (), "update": (scalars, scalars)}
    shapes = {name: list(param.shape) for name, param in model.parameters_and_names()}
    return step.graphs()[graph], inputs[graph], shapes

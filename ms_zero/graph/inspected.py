"""What :mod:`ms_zero.graph.frontend` compiles for a run: its train cell under AutoParallel, without values.

Its process believes to have devices: parameters are declared and never filled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.common.initializer import initializer
from mindspore.communication import create_group, get_rank
from mindspore.parallel.auto_parallel import AutoParallel

from ms_zero import models
from ms_zero.comm import Group
from ms_zero.config import ModelConfig, ParallelConfig, RunConfig, load_config
from ms_zero.graph.moe import auxiliary_sum, twin_of
from ms_zero.graph.parallel import auto_parallel, cut_sequences, options_of, place_blocks
from ms_zero.graph.strategies import ShardedCrossEntropySum
from ms_zero.graph.train import build_train_cell
from ms_zero.mesh import AXES, Mesh
from ms_zero.models.from_config import build_decoder

_DTYPES = {"fp32": ms.float32, "fp16": ms.float16, "bf16": ms.bfloat16}
_FAMILIES = {"gpt": models.GPT, "llama": models.Llama}


def build_run(
    run: str, overrides: Sequence[str], workers: int | None
) -> tuple[AutoParallel, tuple[Tensor, ...], dict[str, Any]]:
    """The wrapped train cell of a run file, the inputs of a step on one rank, and notes.

    Raises:
        UserError: the run file is refused, or asks for what this engine does not do.
    """
    config = load_config(run, overrides, workers, to_run=False).config
    return build_config(config)


def build_config(config: RunConfig) -> tuple[AutoParallel, tuple[Tensor, ...], dict[str, Any]]:
    """As :func:`build_run`, for a config."""
    options = options_of(config, declared_ring(config.parallel))
    dtype = _DTYPES[config.precision.compute]
    plain = declared_model(config.model)
    twin = twin_of(plain, config.model, options.grid, dtype)
    place_blocks(twin, options)
    twin = cut_sequences(twin, config, options.grid)
    loss = ShardedCrossEntropySum(config.model.vocab_size, options.grid)
    aux = auxiliary_sum(config.model, options.grid)
    parts = build_train_cell(config, twin, plain=plain, loss_sum=loss, aux_sum=aux, target="Ascend")
    folder = Path(tempfile.mkdtemp(prefix="ms-zero-speed-up-"))
    cell = auto_parallel(parts.cell, options, 2 + len(parts.extras), folder)
    rows = config.train.micro_batch_size * config.train.accumulation_steps
    shape = (rows, config.data.seq_len)
    inputs = tuple(Tensor(np.zeros(shape, np.int32)) for _ in range(2 + len(parts.extras)))
    mesh = {axis: getattr(config.parallel, axis) for axis in (*AXES, "ep")}
    return cell, inputs, {"parameters": parameter_shapes(plain), "mesh": mesh}


def declared_ring(parallel: ParallelConfig) -> Group | None:
    """The cp ranks of this process, which has taken the place of a rank; None where there is no other."""
    if parallel.cp == 1:
        return None
    mesh, rank = Mesh(**{axis: getattr(parallel, axis) for axis in AXES}), get_rank()
    ranks = mesh.members(rank, ("cp",))
    name = f"cp of {ranks}"
    create_group(name, list(ranks))
    return Group("cp", ranks, ranks.index(rank), name)


def declared_model(config: ModelConfig) -> nn.Cell:
    """The plain model with parameters that have a shape and an initialiser, and no storage."""
    if config.family == "moe":
        model = build_decoder(config, "Ascend")
    else:
        values = {key: value for key, value in vars(config).items() if key != "family"}
        model = _FAMILIES[config.family](**values, target="Ascend")
    declared: dict[int, ms.Parameter] = {}
    for path, cell in model.cells_and_names():
        for name, param in list(cell.parameters_dict(recurse=False).items()):
            key, own, is_trained = id(param), name.rsplit(".", 1)[-1], param.requires_grad
            if key not in declared:
                value = initializer("zeros", tuple(param.shape), ms.float32)
                declared[key] = ms.Parameter(value, name=f"{path}.{own}", requires_grad=is_trained)
            cell.insert_param_to_cell(own, declared[key], check_name_contain_dot=False)
    return model


def parameter_shapes(model: nn.Cell) -> Mapping[str, list[int]]:
    """Name -> shape of each parameter of the whole model."""
    return {name: list(param.shape) for name, param in model.parameters_and_names()}

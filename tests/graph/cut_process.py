"""The AutoParallel step of a run as one rank of an Ascend job compiles it: prints which parts it holds.

A process of its own, which believes to have devices. Arguments: rank, size, preset, overrides.
"""

import json
import sys
import tempfile
from math import prod
from pathlib import Path

from ms_zero import _compat_frontend

rank, size = int(sys.argv[1]), int(sys.argv[2])
_compat_frontend.enable(rank, size, 8)

import numpy as np  # noqa: E402
from mindspore import Tensor  # noqa: E402
from mindspore.communication import get_group_size, get_rank  # noqa: E402

from ms_zero.config import load_config  # noqa: E402
from ms_zero.graph.build import auto_parallel_step  # noqa: E402
from ms_zero.graph.initial import declare, fill, seeded_values  # noqa: E402
from ms_zero.graph.inspected import declared_ring  # noqa: E402
from ms_zero.graph.ir import parse  # noqa: E402
from ms_zero.graph.slices import held_boxes  # noqa: E402
from ms_zero.precision.scaler import StaticLossScaler  # noqa: E402
from ms_zero.recipes.build import build_model  # noqa: E402

config = load_config(sys.argv[3], sys.argv[4:], size, to_run=False).config
folder = Path(tempfile.mkdtemp(prefix="ms-zero-test-"))
model = build_model(config.model)
declare(model)
values = seeded_values(model, config.train.seed)
wholes = {name: tuple(param.shape) for name, param in model.parameters_and_names()}
how = {"scaler": StaticLossScaler(1.0), "schedule": lambda _: 0.1, "folder": folder}
step = auto_parallel_step(config, model, None, ring=declared_ring(config.parallel), **how)
rows = config.train.micro_batch_size * config.train.accumulation_steps
ids = Tensor(np.zeros((rows, config.data.seq_len), np.int32))
text = _compat_frontend.compile_front_end(step.cell, (ids, ids), folder / "dumps")
boxes = held_boxes(step.layouts(), rank, lambda group: (get_rank(group), get_group_size(group)))
fill(model.parameters_and_names(), boxes, values)
filled, declared = {}, []
for name, param in model.parameters_and_names():
    if param.has_init:
        declared.append(name)
    else:
        whole = values(name, 0, prod(wholes[name])).reshape(wholes[name])
        filled[name] = bool(np.array_equal(param.asnumpy(), boxes[name].take(whole)))
report = {
    "filled": filled,
    "declared": declared,
    "parts": {name: [box.global_shape, box.offset, box.shape] for name, box in boxes.items()},
    "shapes": {name: kind.shape for name, kind in parse(text).parameters.items()},
    "model": [param.name for param in model.get_parameters()],
}
print("REPORT " + json.dumps(report), flush=True)

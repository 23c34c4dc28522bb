"""A model that knows nothing of us, trained in the ways in which what a parameter holds changes under it."""

import hashlib

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import memory
from ms_zero.comm import ProcessMesh
from ms_zero.mesh import Mesh
from ms_zero.optim import AdamW
from ms_zero.zero import HostStates, Options, shard

WIDTH, TOKENS = 24, 11


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.wide, self.narrow = nn.Dense(WIDTH, 2 * WIDTH + 1), nn.Dense(2 * WIDTH + 1, WIDTH)
        self.scale = Parameter(Tensor(np.float32(0.7)), name="scale")

    def construct(self, x):
        return x + self.narrow(ops.tanh(self.wide(self.norm(x)))) * self.scale


class Stranger(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.CellList([Block() for _ in range(3)])
        rng = np.random.default_rng(0)
        for param in self.get_parameters():
            param.set_data(Tensor((rng.standard_normal(param.shape) * 0.3).astype(np.float32)))

    def construct(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return ops.matmul(x, self.embedding.embedding_table.T)


def train(comm):
    """A digest of losses and weights by way of training: the same in every process and in every stage."""
    ways = [(0, "fp32", "none"), (3, "fp32", "none"), (3, "fp32", "full"), (3, "fp32", "host")]
    return [run(comm, *way) for way in [*ways, (2, "bf16", "none"), (3, "bf16", "host"), (3, "fp16", "full")]]


def run(comm, stage, policy, technique):
    cell = Stranger()
    if technique == "full":
        memory.apply_recompute(cell, "full")
    mesh = ProcessMesh(Mesh(dp_shard=comm.world_size), comm)
    options = Options(stage=stage, prefetch=2, params_on_host=technique == "host")
    model = shard(cell, mesh, stage=stage, policy=policy, options=options)
    if technique == "host":
        memory.offload_activations(cell, min_bytes=1)
    optimizer = AdamW(model, eps=1e-4, offload=HostStates(), fraction=0.4)
    digest = hashlib.sha256()
    for step in range(3):
        ids = Tensor(np.random.default_rng(step).integers(0, TOKENS, (4, 9)).astype(np.int32))
        with model.record():
            loss = (model(ids) ** 2).mean()
        model.backward(loss)
        optimizer.step(lr=0.05)
        with model.evaluate():
            model(ids)  # nobody waits for it before the weights change again
        digest.update(np.float32(loss.asnumpy()).tobytes())
    for value in model.state_dict().values():
        digest.update(value.astype(np.float32).tobytes())
    return digest.hexdigest()

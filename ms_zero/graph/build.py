"""From a run's configuration to the graph engine."""

from mindspore import nn

from ms_zero.comm import ProcessMesh
from ms_zero.config import RunConfig
from ms_zero.data import DocumentResets
from ms_zero.graph.engine import GraphEngine
from ms_zero.graph.network import LossNetwork
from ms_zero.graph.precision import compute_in
from ms_zero.graph.step import GraphStep
from ms_zero.graph.train import batch_extras, build_update, trained_parameters
from ms_zero.models import initialise
from ms_zero.precision.policy import DTYPES
from ms_zero.precision.scaler import LossScaler

# The ranks that see different data.
_DATA_AXES = ("dp_replicate", "dp_shard")


def build_graph_engine(
    config: RunConfig, pmesh: ProcessMesh, model: nn.Cell, *, scaler: LossScaler, resets: DocumentResets
) -> GraphEngine:
    """Give the model its initial values and the engine its graphs; they are compiled by the first step.

    Args:
        config: of the run; one that `ms_zero.config.require_runnable` lets pass.
        pmesh: of the job.
        model: plain, with parameters frozen as wanted; its values are those of the eager engine.
        scaler: of the loss.
        resets: what restarts where a document begins.
    """
    optim, group = config.optim, pmesh.group(*_DATA_AXES)
    compute_in(model, DTYPES[config.precision.compute], target=config.hardware.target)
    initialise(model, config.train.seed)
    update = build_update(optim, model, trained_parameters(model))
    step = GraphStep(
        LossNetwork(model, batch_extras(config)),
        update,
        weight_decay=optim.weight_decay,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        scaler=scaler,
        group=group,
        bucket_bytes=int(config.parallel.bucket_mb * 2**20),
    )
    notes = _notes(config.precision.compute, group.size)
    return GraphEngine(model, step, group=group, resets=resets, notes=notes)


def _notes(compute: str, num_ranks: int) -> list[str]:
    ranks = f", gradients summed over {num_ranks} ranks inside the graph" if num_ranks > 1 else ""
    return [
        f"engine graph: steps compiled by MindSpore{ranks}; the first takes longer",
        f"precision: weights fp32, computed with in {compute}; gradients and optimizer state fp32",
    ]

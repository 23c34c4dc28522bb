"""From a run's configuration to an engine: model, parallelism, optimizer."""

from mindspore import nn

from ms_zero import models
from ms_zero.comm import ProcessMesh
from ms_zero.config import DataConfig, GPTConfig, LlamaConfig, OptimConfig, RunConfig
from ms_zero.data import DocumentResets
from ms_zero.models.init import InitRule, init_rules, initial_values
from ms_zero.optim.optimizer import SGD, AdamW, Optimizer
from ms_zero.recipes.eager import EagerEngine, trainable_parameters
from ms_zero.zero.bucket import ValueSource
from ms_zero.zero.data_parallel import DataParallel

# The ranks that see different data and hold the same parameters.
DATA_AXES = ("dp_replicate", "dp_shard")
_BYTES_PER_ELEMENT = 4
_STAGES = {0: DataParallel}


def build_engine(config: RunConfig, pmesh: ProcessMesh) -> EagerEngine:
    """Build the model with its initial values, shard its training state and return the engine."""
    model = build_model(config.model)
    group = pmesh.group(*DATA_AXES)
    parallel = _STAGES[config.parallel.zero_stage](
        trainable_parameters(model),
        seeded_values(model, config.train.seed),
        comm=pmesh.comm,
        group=group,
        bucket_elements=max(1, int(config.parallel.bucket_mb * 2**20) // _BYTES_PER_ELEMENT),
        key_of=models.decay_names(model).__contains__,
    )
    optimizer = build_optimizer(config.optim, parallel)
    resets = build_resets(config.data)
    return EagerEngine(model, parallel, optimizer, comm=pmesh.comm, group=group, resets=resets)


def build_model(config: GPTConfig | LlamaConfig) -> nn.Cell:
    """The plain model of a family; its parameters have shapes and no values yet."""
    values = {key: value for key, value in vars(config).items() if key != "family"}
    family = {"gpt": models.GPT, "llama": models.Llama}[config.family]
    return family(**values)


def seeded_values(model: nn.Cell, seed: int) -> ValueSource:
    """Initial values by the layout-invariance contract: element i depends on (seed, name, i) only."""
    rules: dict[str, InitRule] = init_rules(model)
    shapes = {name: tuple(param.shape) for name, param in model.parameters_and_names()}
    return lambda name, start, stop: initial_values(rules[name], name, shapes[name], seed, start, stop)


def build_resets(config: DataConfig) -> DocumentResets:
    """What restarts where a document begins."""
    return DocumentResets(attention=config.reset_attention, positions=config.reset_positions)


def build_optimizer(config: OptimConfig, parallel: DataParallel) -> Optimizer:
    """The optimizer over the buckets of ``parallel``; a bucket's key says whether it decays."""
    flats = [bucket.flat for bucket in parallel.buckets]
    decay = [bool(bucket.layout.key) for bucket in parallel.buckets]
    if config.kind == "sgd":
        return SGD(flats, decay, weight_decay=config.weight_decay)
    return AdamW(
        flats,
        decay,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )

"""From a run's configuration to an engine: model, parallelism, optimizer."""

from mindspore import nn

from ms_zero import models
from ms_zero.comm import ProcessMesh
from ms_zero.config import DataConfig, GPTConfig, LlamaConfig, OptimConfig, RunConfig
from ms_zero.data import DocumentResets
from ms_zero.models.init import InitRule, init_rules, initial_values
from ms_zero.optim.optimizer import SGD, AdamW, GroupOptions, Optimizer
from ms_zero.recipes.eager import EagerEngine
from ms_zero.zero.bucket import ValueSource
from ms_zero.zero.sharded import Groups, Options, Sharded
from ms_zero.zero.units import wrap_blocks

# The ranks that see different data and hold the same parameters.
DATA_AXES = ("dp_replicate", "dp_shard")


def build_engine(config: RunConfig, pmesh: ProcessMesh) -> EagerEngine:
    """Build the model with its initial values, shard its training state and return the engine."""
    model = build_model(config.model)
    sharded = Sharded(
        model,
        seeded_values(model, config.train.seed),
        build_options(config),
        comm=pmesh.comm,
        groups=data_groups(pmesh, config.parallel.zero_stage),
        key_of=models.decay_names(model).__contains__,
        wrap=wrap_blocks(model, leaves=True),
    )
    optimizer = build_optimizer(config.optim, sharded)
    group, resets = pmesh.group(*DATA_AXES), build_resets(config.data)
    return EagerEngine(model, sharded, optimizer, comm=pmesh.comm, group=group, resets=resets)


def build_options(config: RunConfig) -> Options:
    """How the model of a run is sharded."""
    parallel = config.parallel
    return Options(stage=parallel.zero_stage, bucket_bytes=int(parallel.bucket_mb * 2**20))


def data_groups(pmesh: ProcessMesh, stage: int) -> Groups:
    """Stage 0 treats all data-parallel ranks alike; the others shard within dp_shard."""
    if stage == 0:
        return Groups(shard=pmesh.group(*DATA_AXES), replica=pmesh.comm.new_group((pmesh.rank,), "replica"))
    return Groups(shard=pmesh.group("dp_shard"), replica=pmesh.group("dp_replicate"))


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


def build_optimizer(config: OptimConfig, sharded: Sharded) -> Optimizer:
    """The optimizer of a model whose groups are "does it decay"."""
    groups = {False: GroupOptions(weight_decay=0.0)}
    if config.kind == "sgd":
        return SGD(sharded, weight_decay=config.weight_decay, groups=groups)
    return AdamW(
        sharded,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        groups=groups,
    )

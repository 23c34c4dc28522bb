"""Cases of models with experts, alone and with expert parallelism, for :mod:`ms_zero.testing.parity`."""

from types import MappingProxyType

from ms_zero.testing.parity import Case
from ms_zero.testing.problems import SHORT, SLOW_ADAM, Problem, case_of

_TINY = (*SLOW_ADAM, *SHORT, "model.num_experts=12")
MIXTRAL = ("runs/mixtral-tiny", _TINY)
CAPACITY = ("runs/mixtral-tiny", (*_TINY, "model.capacity_factor=1.25"))
UNCLIPPED = ("runs/mixtral-tiny", (*_TINY, "optim.clip_norm=0", "optim.kind=sgd", "optim.lr=0.05"))
DEEPSEEK = ("runs/deepseek-tiny", _TINY)
QWEN = (
    "runs/mixtral-tiny",
    (
        *_TINY,
        "model.experts_per_token=3",
        "model.renormalise=false",
        "model.shared_ffn_hidden_size=48",
        "model.shared_gate=true",
        "model.qkv_bias=true",
        "model.tie_embeddings=true",
        "model.dropout=0.1",
        "model.num_layers=3",
    ),
)
# In 16 bits every token visits every expert, so that no rounding changes what is compared with fp32.
_ALL = ("model.num_experts=4", "model.experts_per_token=4", "model.num_layers=2")
_ALL_GROUPS = (*_ALL, "model.expert_groups=2", "model.groups_per_token=2")
FP16 = ("runs/mixtral-tiny", (*_TINY, *_ALL, "precision.policy=fp16"))
BF16 = ("runs/deepseek-tiny", (*_TINY, *_ALL_GROUPS, "precision.policy=bf16"))
_NAMES = MappingProxyType(
    {
        MIXTRAL: "mixtral",
        CAPACITY: "mixtral capacity",
        UNCLIPPED: "mixtral sgd unclipped",
        DEEPSEEK: "deepseek",
        QWEN: "qwen, dropout",
        FP16: "mixtral fp16",
        BF16: "deepseek bf16",
    }
)

_PP, _TP, _CP = "parallel.pp=2", "parallel.tp=2", "parallel.cp=2"


def _zero(stage: int, *more: str) -> tuple[str, ...]:
    return (f"parallel.zero_stage={stage}", *more)


# (problem, world, ep, microbatches, further overrides)
_QUICK = (
    (MIXTRAL, 2, 2, 2, ()),
    (DEEPSEEK, 4, 2, 1, _zero(3)),
    (CAPACITY, 4, 2, 3, _zero(2, "parallel.dp_replicate=2")),
    (DEEPSEEK, 4, 2, 3, (_PP,)),
    (DEEPSEEK, 4, 2, 1, (_TP,)),
    (CAPACITY, 2, 2, 3, (_CP,)),
)
_FURTHER = (
    (MIXTRAL, 1, 1, 3, ()),
    (DEEPSEEK, 1, 1, 3, ()),
    (DEEPSEEK, 2, 1, 2, _zero(3)),
    (DEEPSEEK, 2, 2, 1, ()),
    (MIXTRAL, 3, 3, 2, ()),
    (DEEPSEEK, 3, 3, 1, _zero(3)),
    (MIXTRAL, 4, 4, 1, ()),
    (DEEPSEEK, 4, 4, 3, _zero(1)),
    (CAPACITY, 4, 4, 3, _zero(3)),
    (UNCLIPPED, 4, 4, 1, _zero(2)),
    (MIXTRAL, 4, 2, 1, ()),
    (MIXTRAL, 4, 2, 3, _zero(1)),
    (MIXTRAL, 4, 2, 3, _zero(2)),
    (MIXTRAL, 4, 2, 3, _zero(3, "memory.recompute=full")),
    (DEEPSEEK, 4, 2, 3, _zero(1, "parallel.sync_each_microbatch=true")),
    (DEEPSEEK, 4, 2, 3, _zero(2, "parallel.bucket_mb=0.05")),
    (DEEPSEEK, 4, 2, 3, _zero(3, "parallel.reshard_after_forward=false", "offload.optimizer=cpu")),
    (CAPACITY, 4, 2, 1, _zero(0, "parallel.dp_replicate=2")),
    (DEEPSEEK, 4, 2, 3, _zero(3, "parallel.dp_replicate=2")),
    (UNCLIPPED, 4, 2, 3, _zero(1, "parallel.dp_replicate=2")),
    (MIXTRAL, 4, 2, 6, (_PP, "parallel.schedule=gpipe")),
    (MIXTRAL, 4, 2, 3, (_PP, *_zero(3))),
    (DEEPSEEK, 4, 2, 2, (_PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2")),
    (MIXTRAL, 4, 2, 3, (_PP, "parallel.schedule=zb-h1", *_zero(3))),
    (MIXTRAL, 4, 4, 1, _zero(3, "parallel.wrap=size", "parallel.wrap_elements=1500")),
    (MIXTRAL, 4, 2, 1, _zero(2, "memory.activations=host")),
    (MIXTRAL, 4, 2, 3, (_TP,)),
    (MIXTRAL, 4, 2, 1, (_TP, *_zero(3))),
    (CAPACITY, 4, 2, 1, (_TP, "parallel.sequence_parallel=true")),
    (DEEPSEEK, 4, 2, 3, (_TP, *_zero(2, "parallel.sequence_parallel=true"))),
    (MIXTRAL, 2, 2, 6, (_CP,)),
    (CAPACITY, 2, 1, 3, (_CP, "parallel.context=ulysses", *_zero(0))),
    (DEEPSEEK, 2, 1, 3, (_CP, "parallel.context=ulysses")),
    (DEEPSEEK, 4, 2, 3, (_CP, *_zero(3))),
    (CAPACITY, 4, 4, 2, (_CP, *_zero(1), "memory.recompute=full")),
    (QWEN, 4, 2, 3, (_CP, _PP)),
    (MIXTRAL, 4, 2, 3, (_CP, _TP, "parallel.sequence_parallel=true")),
    (DEEPSEEK, 8, 2, 1, (_TP, *_zero(3))),
    (MIXTRAL, 8, 2, 3, (_PP, _TP)),
    (DEEPSEEK, 8, 2, 3, (_PP, *_zero(2))),
)


# (problem, world, ep, microbatches, further overrides)
_DATA_QUICK = (
    (DEEPSEEK, 2, 1, 3, _zero(0)),
    (DEEPSEEK, 2, 1, 3, _zero(3, "memory.recompute=full")),
    (CAPACITY, 1, 1, 3, _zero(0, "memory.recompute=sqrt")),
    (QWEN, 2, 1, 2, _zero(2, "memory.recompute=selective")),
    (FP16, 2, 1, 2, _zero(3)),
    (BF16, 2, 1, 1, _zero(1)),
)
_DATA = (
    *((problem, 2, 1, 2, _zero(stage)) for problem in (MIXTRAL, CAPACITY, QWEN) for stage in range(4)),
    *((DEEPSEEK, world, 1, 2, _zero(stage)) for world in (1, 3) for stage in range(4)),
    *((problem, 2, 1, 3, _zero(stage)) for problem in (FP16, BF16) for stage in range(4)),
    (UNCLIPPED, 3, 1, 1, _zero(3, "parallel.wrap=size", "parallel.wrap_elements=1500")),
    (DEEPSEEK, 2, 1, 3, _zero(3, "parallel.wrap=size", "parallel.wrap_elements=1500")),
    (DEEPSEEK, 4, 1, 1, _zero(3, "parallel.dp_replicate=2", "offload.params=cpu", "offload.optimizer=cpu")),
    (DEEPSEEK, 2, 1, 3, _zero(2, "memory.recompute=sqrt")),
    (QWEN, 2, 1, 3, _zero(3, "memory.recompute=sqrt", "parallel.reshard_after_forward=false")),
    (FP16, 2, 1, 3, _zero(2, "memory.recompute=full")),
    (FP16, 2, 1, 3, (_PP,)),
    (BF16, 2, 1, 3, (_PP, *_zero(2))),
    (QWEN, 2, 1, 3, (_PP, "memory.recompute=full")),
    (MIXTRAL, 8, 1, 4, ("parallel.pp=8",)),  # more stages than blocks
    (DEEPSEEK, 4, 1, 4, ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual_stages=3")),
)


def moe_cases(quick: bool) -> list[Case]:
    """One to four ranks that each hold all experts: ZeRO 0 to 3, recompute, 16 bits, stages."""
    chosen = _DATA_QUICK if quick else (*_DATA_QUICK, *_DATA)
    return [_case(*case) for case in chosen]


def expert_cases(quick: bool) -> list[Case]:
    """Up to four ranks that share experts, one or more times, with ZeRO 0 to 3 and the other axes."""
    chosen = _QUICK if quick else (*_QUICK, *_FURTHER)
    return [_case(*case) for case in chosen]


def _case(problem: Problem, world: int, ep: int, count: int, overrides: tuple[str, ...]) -> Case:
    return case_of(_NAMES, problem, world, ("ep", ep), count, overrides)

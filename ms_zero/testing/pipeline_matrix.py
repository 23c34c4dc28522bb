"""Cases of pipeline parallelism for :mod:`ms_zero.testing.parity`."""

from types import MappingProxyType

from ms_zero.testing.parity import Case
from ms_zero.testing.problems import SHORT, SLOW_ADAM, Problem, case_of

_SHORT = (*SHORT, "model.num_layers=4")
GPT = ("runs/quickstart", (*SLOW_ADAM, *_SHORT))
UNTIED = ("runs/quickstart", (*SLOW_ADAM, *_SHORT, "model.tie_embeddings=false"))
DROPOUT = ("runs/quickstart", (*SLOW_ADAM, *_SHORT, "model.dropout=0.1"))
LLAMA = ("runs/llama-tiny", (*SLOW_ADAM, *_SHORT))
_RESETS = ("data.reset_attention=true", "data.reset_positions=true")
DOCUMENTS = ("runs/llama-tiny", (*SLOW_ADAM, *_SHORT, *_RESETS))
# In 16 bits plain steps: Adam's are relative, and let the rounding of small gradients show in full.
_SGD = ("optim.kind=sgd", "optim.lr=0.05")
_OVERFLOW = (
    "precision.policy=fp16",
    "precision.initial_scale=1048576",
    "precision.growth_interval=3",
    "precision.hysteresis=2",
)
#: fp16 with a loss scale that starts too high: it overflows, recovers and grows.
OVERFLOWING = ("runs/quickstart", (*_SGD, *_SHORT, *_OVERFLOW))
FP16 = ("runs/quickstart", (*_SGD, *_SHORT, "precision.policy=fp16"))
BF16 = ("runs/llama-tiny", (*_SGD, *_SHORT, "precision.policy=bf16"))
TIED_LLAMA = ("runs/llama-tiny", (*SLOW_ADAM, *_SHORT, "model.tie_embeddings=true"))
_NAMES = MappingProxyType(
    {
        GPT: "gpt",
        UNTIED: "gpt untied",
        DROPOUT: "gpt dropout",
        LLAMA: "llama",
        TIED_LLAMA: "llama tied",
        DOCUMENTS: "llama documents",
        OVERFLOWING: "gpt fp16 overflows",
        FP16: "gpt fp16",
        BF16: "llama bf16",
    }
)

_INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")
_FOUR_CHUNKS = ("parallel.schedule=interleaved", "parallel.virtual_stages=4")
_EMPTY_ENDS = "parallel.stage_layers=[0, 4, 0]"
_ZB = "parallel.schedule=zb-h1"
_RESHARD_LATE = ("memory.recompute=full", "parallel.reshard_after_forward=false")

# (problem, world, pp, microbatches, further overrides)
_QUICK = (
    (GPT, 2, 2, 4, ()),
    (LLAMA, 2, 2, 3, ("parallel.schedule=gpipe",)),
    (DROPOUT, 2, 2, 4, _INTERLEAVED),
    (TIED_LLAMA, 2, 2, 6, ("parallel.schedule=zb-h1",)),
    (GPT, 4, 2, 3, ("parallel.zero_stage=3", "parallel.wrap=size", "parallel.wrap_elements=5000")),
    (UNTIED, 4, 2, 2, ("parallel.zero_stage=2", *_FOUR_CHUNKS)),
    (FP16, 2, 2, 3, ()),
    (GPT, 3, 3, 2, ("parallel.stage_layers=[2, 0, 2]", "parallel.schedule=zb-h1")),
)
_FURTHER = (
    (UNTIED, 2, 2, 1, ()),
    (DROPOUT, 2, 2, 3, ("memory.recompute=full",)),
    (GPT, 2, 2, 12, ("parallel.bucket_mb=0.05", "parallel.zero_stage=0")),
    (GPT, 3, 3, 4, ()),
    (LLAMA, 3, 3, 2, ("parallel.schedule=gpipe",)),
    (TIED_LLAMA, 3, 3, 4, ("parallel.schedule=zb-h1",)),
    (GPT, 4, 4, 6, ()),
    (LLAMA, 4, 4, 3, ("parallel.schedule=zb-h1",)),
    (TIED_LLAMA, 4, 4, 4, ("parallel.schedule=gpipe",)),
    (LLAMA, 4, 2, 6, ("parallel.zero_stage=0",)),
    (TIED_LLAMA, 4, 2, 3, ("parallel.zero_stage=1",)),
    (GPT, 4, 2, 2, ("parallel.zero_stage=1", "parallel.sync_each_microbatch=true")),
    (TIED_LLAMA, 4, 2, 3, ("parallel.zero_stage=2",)),
    (LLAMA, 4, 2, 6, ("parallel.zero_stage=3", "parallel.schedule=zb-h1")),
    (TIED_LLAMA, 4, 2, 2, ("parallel.zero_stage=3", *_INTERLEAVED)),
    (GPT, 4, 2, 3, ("parallel.zero_stage=3", "parallel.dp_replicate=2", "parallel.dp_shard=1")),
    (GPT, 4, 2, 3, ("parallel.zero_stage=3", *_RESHARD_LATE)),
    (DROPOUT, 4, 2, 3, ("parallel.zero_stage=3", "parallel.wrap=size", "parallel.wrap_elements=20000")),
    (GPT, 2, 2, 4, ("memory.activations=host",)),
    (LLAMA, 2, 2, 4, ("memory.recompute=selective",)),
    (GPT, 2, 2, 3, ("offload.optimizer=cpu",)),
    (DOCUMENTS, 2, 2, 4, _INTERLEAVED),
    (OVERFLOWING, 2, 2, 3, ()),
    (OVERFLOWING, 4, 4, 3, ("parallel.schedule=gpipe",)),
    (OVERFLOWING, 4, 2, 3, ("parallel.zero_stage=3", "parallel.schedule=zb-h1")),
    (OVERFLOWING, 2, 1, 3, ()),
    (OVERFLOWING, 4, 2, 6, ("parallel.zero_stage=2", *_INTERLEAVED)),
    (BF16, 2, 2, 4, ("parallel.schedule=zb-h1",)),
    (BF16, 4, 2, 2, ("parallel.zero_stage=2", *_INTERLEAVED)),
    (LLAMA, 2, 2, 4, ("parallel.schedule=zb-h1", "memory.recompute=full")),
    (DROPOUT, 4, 2, 3, ("parallel.zero_stage=3", "parallel.schedule=zb-h1", "memory.recompute=selective")),
    (TIED_LLAMA, 4, 2, 3, ("parallel.zero_stage=2", "parallel.schedule=zb-h1", "memory.activations=host")),
    (GPT, 4, 2, 3, ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.schedule=zb-h1")),
    (LLAMA, 3, 3, 4, ("parallel.stage_layers=[0, 4, 0]", "parallel.zero_stage=3")),
    (UNTIED, 3, 3, 4, ("parallel.stage_balance=time",)),
    (GPT, 4, 2, 3, ("parallel.tp=2",)),
    (DROPOUT, 4, 2, 4, ("parallel.tp=2", "parallel.sequence_parallel=true", *_INTERLEAVED)),
    (TIED_LLAMA, 4, 2, 3, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    (TIED_LLAMA, 8, 2, 2, ("parallel.tp=2", "parallel.zero_stage=3")),
    (GPT, 8, 2, 2, ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.zero_stage=2")),
    (GPT, 4, 2, 3, ("parallel.zero_stage=3",)),
    (UNTIED, 4, 2, 2, ("parallel.zero_stage=2", *_INTERLEAVED)),
    # More stages than the 4 blocks: some hold nothing and pass on what they get, also the first or last.
    (GPT, 8, 8, 4, ()),
    (TIED_LLAMA, 8, 8, 3, ("parallel.schedule=gpipe",)),
    (DROPOUT, 8, 8, 4, ("parallel.schedule=zb-h1",)),
    (DOCUMENTS, 4, 4, 4, _FOUR_CHUNKS),
    (OVERFLOWING, 8, 8, 3, ("parallel.schedule=zb-h1",)),
    (TIED_LLAMA, 4, 2, 2, ("parallel.zero_stage=3", *_FOUR_CHUNKS)),
    (GPT, 2, 2, 4, ("memory.activations=host", *_FOUR_CHUNKS)),
    *((TIED_LLAMA, 6, 3, 2, (f"parallel.zero_stage={stage}", _EMPTY_ENDS)) for stage in range(4)),
    *((UNTIED, 6, 3, 2, (f"parallel.zero_stage={stage}", _EMPTY_ENDS, _ZB)) for stage in (0, 3)),
    (LLAMA, 6, 3, 2, ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.stage_layers=[4, 0, 0]")),
)


def pipeline_cases(quick: bool) -> list[Case]:
    """Two to eight stages, all schedules, data and tensor parallelism, ZeRO 0 to 3, tied or not, 16 bits."""
    chosen = _QUICK if quick else (*_QUICK, *_FURTHER)
    return [_case(*case) for case in chosen]


def _case(problem: Problem, world: int, pp: int, count: int, overrides: tuple[str, ...]) -> Case:
    return case_of(_NAMES, problem, world, ("pp", pp), count, overrides)

"""The cases by which tensor and sequence parallelism are certified: a part of the parallel matrix.

Sizes are small and awkward: vocabulary and MLP (all but one) divide by none of the degrees, and key-value
heads may be fewer than ranks. The optimizer is AdamW with eps 1e-4, so that rounding noise in a gradient that
is truly zero does not become an update, or SGD.
"""

from types import MappingProxyType

from ms_zero.testing.parity import Case
from ms_zero.testing.problems import AWKWARD, FAST_ADAM, FAST_SGD, GPT, LLAMA

#: name -> preset, what is trained, tensor-parallel degrees that divide it.
PROBLEMS = MappingProxyType(
    {
        "gpt": (GPT, FAST_ADAM, (2, 3, 4)),
        "gpt untied, dropout": (
            GPT,
            (*FAST_SGD, "model.tie_embeddings=false", "model.dropout=0.1"),
            (2, 3, 4),
        ),
        "llama, 2 kv heads": (LLAMA, (*FAST_ADAM, "model.num_kv_heads=2", "model.vocab_size=264"), (2, 4)),
        "llama tied, 1 kv head, norms of q and k": (
            LLAMA,
            (*FAST_ADAM, "model.num_kv_heads=1", "model.tie_embeddings=true", "model.qk_norm=true"),
            (3, 4),
        ),
    }
)
_ONCE = "train.accumulation_steps=1"
_ALONE = (_ONCE, "parallel.zero_stage=0")
_LAYOUTS = MappingProxyType(
    {
        "zero 0": _ALONE,
        "zero 1, 2 replicas": (_ONCE, "parallel.zero_stage=1", "parallel.dp_replicate=2"),
        "zero 2, 2 microbatches": ("train.accumulation_steps=2", "parallel.zero_stage=2"),
        "zero 3, recompute": (_ONCE, "parallel.zero_stage=3", "memory.recompute=full"),
    }
)


def tensor_cases(quick: bool) -> list[Case]:
    """Each degree alone, and 2 tensor-parallel x 2 data-parallel ranks in every ZeRO stage.

    All of them with the sequence whole and cut.
    """
    cases = []
    for name, (base, problem, degrees) in PROBLEMS.items():
        layouts = {f"tp {degree}": (degree, degree, _ALONE) for degree in degrees}
        if 2 in degrees:
            layouts |= {f"tp 2 x dp 2, {label}": (4, 2, layout) for label, layout in _LAYOUTS.items()}
        for label, (world, degree, layout) in layouts.items():
            for suffix, cut in (("", "false"), (", sequence cut", "true")):
                parallel = (f"parallel.tp={degree}", f"parallel.sequence_parallel={cut}")
                label_of_case = f"{name}, {label}{suffix}"
                cases.append(Case(label_of_case, world, base, (*problem, *AWKWARD), (*layout, *parallel)))
    return cases[::7] if quick else cases

"""The cases by which context parallelism is certified: a part of the parallel matrix.

Samples of 24 tokens are cut by 2, 3 and 4 ranks, in the order of the ring and of Ulysses. Documents are
shorter than a sample, so that their borders lie within and between chunks. Key-value heads may be fewer than
ranks. The optimizer is AdamW with eps 1e-4, so that rounding noise in a gradient that is truly zero does not
become an update, or SGD.

In fp32 only: in 16 bits the gradient of a weight is rounded after the sum over a rank's tokens, so that it
depends on how many these are, as on the size of a microbatch.
"""

from pathlib import Path
from types import MappingProxyType

from ms_zero.testing.parity import Case
from ms_zero.testing.problems import AWKWARD, FAST_ADAM, FAST_SGD, GPT, LLAMA

_RESETS = ("data.reset_attention=true", "data.reset_positions=true", "data.validation_fraction=0")
#: name -> preset, what is trained, whether the samples are packed of short documents.
PROBLEMS = MappingProxyType(
    {
        "gpt": (GPT, FAST_ADAM, False),
        "gpt untied, dropout": (GPT, (*FAST_SGD, "model.tie_embeddings=false", "model.dropout=0.1"), False),
        "gpt documents": (GPT, (*FAST_ADAM, *_RESETS), True),
        "llama, 2 kv heads": (LLAMA, (*FAST_ADAM, "model.num_kv_heads=2"), False),
        "llama tied, 4 kv heads, documents, dropout": (
            LLAMA,
            (*FAST_ADAM, *_RESETS, "model.num_kv_heads=4", "model.tie_embeddings=true", "model.dropout=0.1"),
            True,
        ),
    }
)
_ONCE, _TWICE = "train.accumulation_steps=1", "train.accumulation_steps=2"
# Layouts of 2 x 2 ranks: label -> overrides beside parallel.cp=2.
_LAYOUTS = MappingProxyType(
    {
        "dp 2, zero 0": (_ONCE, "parallel.zero_stage=0"),
        "dp 2, zero 1, 2 replicas, offload": (
            _ONCE,
            "parallel.zero_stage=1",
            "parallel.dp_replicate=2",
            "memory.activations=host",
            "offload.optimizer=cpu",
        ),
        "dp 2, zero 2, 2 microbatches": (_TWICE, "parallel.zero_stage=2"),
        "dp 2, zero 3, recompute": (_ONCE, "parallel.zero_stage=3", "memory.recompute=full"),
        "tp 2, zero 1": (_TWICE, "parallel.tp=2", "parallel.zero_stage=1"),
        "tp 2, sequence cut, selective": (
            _ONCE,
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "memory.recompute=selective",
        ),
        "pp 2": ("train.accumulation_steps=4", "parallel.pp=2"),
        "pp 2, zero 3": (_TWICE, "parallel.pp=2", "parallel.zero_stage=3"),
    }
)
# Layouts of 8 ranks: cp, label -> overrides.
_OF_EIGHT = MappingProxyType(
    {
        (4, "dp 2, zero 3"): (_TWICE, "parallel.zero_stage=3"),
        (2, "dp 2 x tp 2, sequence cut"): (
            _ONCE,
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "parallel.zero_stage=2",
        ),
        (2, "pp 2 x tp 2"): (_TWICE, "parallel.pp=2", "parallel.tp=2"),
        (2, "pp 2 x dp 2, zb-h1"): (
            _TWICE,
            "parallel.pp=2",
            "parallel.schedule=zb-h1",
            "parallel.zero_stage=1",
        ),
    }
)
_QUICK = (
    ("gpt", "ring", 2, 2, "alone"),
    ("gpt untied, dropout", "ring", 3, 3, "alone"),
    ("gpt documents", "ulysses", 3, 3, "alone"),
    ("llama, 2 kv heads", "ulysses", 4, 4, "alone"),
    ("llama tied, 4 kv heads, documents, dropout", "ring", 4, 2, "dp 2, zero 3, recompute"),
    ("llama tied, 4 kv heads, documents, dropout", "ring", 4, 2, "tp 2, sequence cut, selective"),
    ("gpt untied, dropout", "ulysses", 4, 2, "dp 2, zero 2, 2 microbatches"),
    ("gpt documents", "ring", 4, 2, "pp 2"),
)


def context_cases(quick: bool, scratch: Path) -> list[Case]:
    """Each degree alone, 2 x 2 ranks of data, tensor and pipeline parallelism, 8 ranks.

    `scratch`: a folder for the text of documents.
    """
    corpus = _documents(scratch / "context-documents")
    chosen = _QUICK if quick else tuple(_all())
    return [_case(corpus, *choice) for choice in chosen]


def _all() -> list[tuple[str, str, int, int, str]]:
    """(problem, method, world, cp, layout) of the whole matrix."""
    found = []
    for name in PROBLEMS:
        for method in ("ring", "ulysses"):
            degrees = (2, 4) if method == "ulysses" and name.startswith("llama") else (2, 3, 4)
            found += [(name, method, degree, degree, "alone") for degree in degrees]
            found += [(name, method, 4, 2, label) for label in _LAYOUTS]
    for name in ("gpt documents", "llama, 2 kv heads"):
        found += [(name, method, 8, cp, label) for method in ("ring", "ulysses") for cp, label in _OF_EIGHT]
    return found


def _case(corpus: tuple[str, ...], name: str, method: str, world: int, cp: int, label: str) -> Case:
    base, problem, packed = PROBLEMS[name]
    layouts = {**_LAYOUTS, **{of_eight: layout for (_, of_eight), layout in _OF_EIGHT.items()}}
    layouts["alone"] = _ONCE, "parallel.zero_stage=0"
    overrides = (*layouts[label], f"parallel.cp={cp}", f"parallel.context={method}")
    title = f"{name}, {method} {cp}" + ("" if label == "alone" else f" x {label}")
    return Case(title, world, base, (*problem, *AWKWARD, *(corpus if packed else ())), overrides)


def _documents(folder: Path) -> tuple[str, ...]:
    """Write documents of 3 to 30 tokens; returns the overrides that read them."""
    folder.mkdir(exist_ok=True)
    for number in range(300):
        text = "".join(chr(97 + (number * i + i * i) % 26) for i in range(2 + number * 7 % 28))
        (folder / f"{number:03d}.txt").write_text(text)
    return "data.source=files", f"data.files=[{folder}/*.txt]"

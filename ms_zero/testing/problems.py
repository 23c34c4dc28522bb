"""What the cases of the parallel matrices have in common: small problems, and the names of cases."""

from collections.abc import Mapping

from ms_zero.testing.parity import Case

GPT, LLAMA = "runs/quickstart", "runs/llama-tiny"

#: What is compared is training; nothing else runs or is written.
QUIET = ("train.eval_interval=0", "train.output_dir=unused", "optim.warmup_steps=3")
#: Where a true gradient is zero, eps decides whether rounding noise becomes an update; 1e-4 prevents it.
ADAM = ("optim.kind=adamw", "optim.eps=1e-4")

#: Two blocks whose MLP divides by no degree but 5 and 17, for tensor and context parallelism.
AWKWARD = (
    *QUIET,
    "model.num_layers=2",
    "model.hidden_size=48",
    "model.num_heads=12",
    "model.ffn_hidden_size=85",
    "model.max_seq_len=24",
    "data.seq_len=24",
    "train.global_batch_size=8",
)
FAST_ADAM = (*ADAM, "optim.lr=3e-3")
FAST_SGD = ("optim.kind=sgd", "optim.lr=0.1", "optim.clip_norm=0")

#: A batch that 2, 3, 4 and 6 workers share evenly, for stages and experts.
SHORT = (*QUIET, "data.seq_len=32", "train.global_batch_size=12")
SLOW_ADAM = (*ADAM, "optim.lr=1e-3")

Problem = tuple[str, tuple[str, ...]]
"""A preset and overrides: what is trained, whatever the layout."""


def case_of(
    names: Mapping[Problem, str],
    problem: Problem,
    world: int,
    axis: tuple[str, int],
    count: int,
    overrides: tuple[str, ...],
) -> Case:
    """A problem in a layout.

    Args:
        names: of problems.
        problem: what is trained.
        world: workers.
        axis: name and degree of the axis that the matrix is about.
        count: microbatches.
        overrides: the rest of the layout.
    """
    name, degree = axis
    settings = [override.split(".", 1)[1] for override in overrides]
    title = [f"{names[problem]}", f"{world} workers", f"{name} {degree}", f"{count} microbatches"]
    layout = (f"parallel.{name}={degree}", f"train.accumulation_steps={count}", *overrides)
    return Case(", ".join([*title, *settings]), world, *problem, layout)

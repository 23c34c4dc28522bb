"""Does a layout train like plain single-process training? The harness behind ``scripts/parity.py``.

A case is a run config with overrides and a number of workers. It is trained by the real trainer; the
reference (:mod:`ms_zero.testing.reference`) trains the same model on the same samples without any of the
engine. Compared are loss and gradient norm of each step, the gradient of every parameter in one step and
every parameter at the end. Workers hand over tensors as the checkpoint shards that their engine reports, so
the harness needs to know nothing about a layout.

Measures of difference:

- loss, gradient norm: ``|a - b| / |b|`` per step.
- tensors: ``max |a - b| / max(max |b|, floor)`` per parameter. The floor is 1e-3 of the largest element of
  all parameters or gradients, so that a parameter whose true gradient is zero (a key bias, which softmax
  cancels) is not compared by its rounding noise alone.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ms_zero.checkpoint import Shard, latest, open_checkpoint, save
from ms_zero.comm import Communicator
from ms_zero.config import load_config
from ms_zero.models.init import decay_names, initialise
from ms_zero.recipes.build import build_model, build_resets
from ms_zero.runner import build_batch_schedule, build_schedule, build_trainer, load_data
from ms_zero.testing.reference import ReferenceRun
from ms_zero.testing.workers import run_workers

FLOOR = 1e-3


@dataclass(frozen=True)
class Case:
    """One layout to compare.

    Attributes:
        name: what the table shows.
        world_size: number of workers.
        base: path or preset name of the run config.
        problem: overrides that define what is trained; cases with equal base and problem share a reference.
        layout: overrides that must not change the result.
    """

    name: str
    world_size: int
    base: str
    problem: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """Where a run first leaves the reference."""

    what: str
    where: str
    value: float
    reference: float

    def __str__(self) -> str:
        return f"{self.what} at {self.where}: {self.value!r}, reference {self.reference!r}"


@dataclass
class Result:
    """The largest differences of one case, and the first one beyond the tolerance."""

    case: Case
    max_rel: dict[str, float] = field(default_factory=dict)
    divergence: Divergence | None = None

    def note(self, kind: str, difference: float, tolerance: float, divergence: Divergence) -> None:
        """Record one comparison; a difference above the tolerance diverges, and nan counts as infinite."""
        if math.isnan(difference):
            difference = math.inf
        self.max_rel[kind] = max(self.max_rel.get(kind, 0.0), difference)
        if difference > tolerance and self.divergence is None:
            self.divergence = divergence


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted differences."""

    loss: float = 1e-5
    grad_norm: float = 1e-5
    grad: float = 1e-5
    param: float = 1e-5


@dataclass(frozen=True)
class Trace:
    """What a training left behind: a loss and a gradient norm per step, and tensors by logical name."""

    losses: list[float]
    grad_norms: list[float]
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]


@dataclass(frozen=True)
class Plan:
    """How long cases are trained; ``gradient_step`` (from 1) is the step whose gradients are compared."""

    steps: int
    gradient_step: int = 2
    tolerance: Tolerance = Tolerance()


def run_cases(cases: Sequence[Case], plan: Plan) -> Iterator[Result]:
    """Train all cases and compare each with its reference; cases of one world size share one job."""
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        references = _train_references(cases, plan, Path(scratch))
        for world_size in sorted({case.world_size for case in cases}):
            members = [case for case in cases if case.world_size == world_size]
            jobs = [_job(case, Path(scratch) / f"{world_size}-{i}") for i, case in enumerate(members)]
            arguments = (jobs, plan.steps, plan.gradient_step)
            scalars = run_workers(world_size, train_cases, *arguments, timeout_s=3600)
            for case, job, traced in zip(members, jobs, scalars[0], strict=True):
                trace = _read_trace(traced, Path(job["folder"]))
                yield compare(case, trace, references[case.base, case.problem], plan.tolerance)


def compare(case: Case, trace: Trace, reference: Trace, tolerance: Tolerance) -> Result:
    """Compare what was trained step by step and tensor by tensor."""
    result = Result(case)
    losses = zip(trace.losses, reference.losses, strict=True)
    norms = zip(trace.grad_norms, reference.grad_norms, strict=True)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        for kind, (ours, theirs) in (("loss", loss), ("grad_norm", norm)):
            difference = abs(ours - theirs) / abs(theirs) if theirs else abs(ours)
            divergence = Divergence(kind, f"step {step}", ours, theirs)
            result.note(kind, difference, getattr(tolerance, kind), divergence)
    _compare_tensors(result, "grad", trace.grads, reference.grads, tolerance.grad)
    _compare_tensors(result, "param", trace.params, reference.params, tolerance.param)
    return result


def _compare_tensors(
    result: Result,
    kind: str,
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    tolerance: float,
) -> None:
    assert ours.keys() == theirs.keys(), f"{kind}: different names {sorted(ours.keys() ^ theirs.keys())[:4]}"
    floor = FLOOR * max(float(np.abs(tensor).max()) for tensor in theirs.values())
    for name, reference in theirs.items():
        gap = np.abs(ours[name].astype(np.float64) - reference)
        at = np.unravel_index(int(gap.argmax()), gap.shape)  # a nan is found before any number
        scale = max(float(np.abs(reference).max()), floor)
        difference = float(gap[at]) / scale
        place = f"{name}{[int(i) for i in at]}"
        divergence = Divergence(kind, place, float(ours[name][at]), float(reference[at]))
        result.note(kind, difference, tolerance, divergence)


def _job(case: Case, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {"base": case.base, "overrides": [*case.problem, *case.layout], "folder": str(folder)}


def _train_references(
    cases: Sequence[Case], plan: Plan, scratch: Path
) -> dict[tuple[str, tuple[str, ...]], Trace]:
    problems = list(dict.fromkeys((case.base, case.problem) for case in cases))
    jobs = [
        _job(Case("reference", 1, base, problem), scratch / f"reference-{i}")
        for i, (base, problem) in enumerate(problems)
    ]
    (scalars,) = run_workers(1, train_references, jobs, plan.steps, plan.gradient_step, timeout_s=3600)
    traces = {}
    for problem, job, traced in zip(problems, jobs, scalars, strict=True):
        tensors = [dict(np.load(Path(job["folder"]) / f"{kind}.npz")) for kind in ("grads", "params")]
        traces[problem] = Trace(*traced, *tensors)
    return traces


def train_references(comm: Communicator, jobs: list[dict], steps: int, gradient_step: int) -> list:
    """Worker: train each job's problem plainly; returns losses and gradient norms, saves tensors."""
    return [_train_reference(job, steps, gradient_step) for job in jobs]


def _train_reference(job: dict, steps: int, gradient_step: int) -> tuple[list[float], list[float]]:
    config = load_config(job["base"], job["overrides"]).config
    model = build_model(config.model)
    initialise(model, config.train.seed)
    loader = load_data(config).train_loader(config.train.seed)
    schedule, resets = build_schedule(config), build_resets(config.data)
    run = ReferenceRun(
        model, loader, schedule, config.optim, decay_names(model), resets, config.train.seed
    )
    losses, norms = [], []
    for step, made in enumerate(run.steps(steps, build_batch_schedule(config.train)), start=1):
        losses.append(made.loss)
        norms.append(made.grad_norm)
        if step == gradient_step:
            np.savez(Path(job["folder"]) / "grads.npz", **made.grads)
    np.savez(Path(job["folder"]) / "params.npz", **run.parameters())
    return losses, norms


def train_cases(comm: Communicator, jobs: list[dict], steps: int, gradient_step: int) -> list:
    """Worker: train each job with the real trainer; returns losses and gradient norms, saves tensors."""
    return [_train_case(comm, job, steps, gradient_step) for job in jobs]


def _train_case(
    comm: Communicator, job: dict, steps: int, gradient_step: int
) -> tuple[list[float], list[float]]:
    config = load_config(job["base"], job["overrides"], comm.world_size).config
    trainer = build_trainer(config, load_data(config), comm)
    folder = Path(job["folder"])

    def keep_gradients() -> None:
        if trainer.progress.step + 1 == gradient_step:
            _save_shards(comm, folder / "grads", trainer.engine.gradient_shards())

    results = [trainer.step(on_gradient=keep_gradients) for _ in range(steps)]
    _save_shards(comm, folder / "params", trainer.engine.state_shards())
    return [result.loss for result in results], [result.grad_norm for result in results]


def _save_shards(comm: Communicator, root: Path, shards: Iterable[tuple[Shard, np.ndarray]]) -> None:
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    save(root, 0, shards, {}, exchange=comm.exchange, barrier=comm.barrier, **ranks)


def _read_trace(scalars: tuple[list[float], list[float]], folder: Path) -> Trace:
    grads, state = (open_checkpoint(latest(folder / kind)) for kind in ("grads", "params"))
    params = {name.removeprefix("model."): name for name in state.names() if name.startswith("model.")}
    return Trace(
        *scalars,
        {name: grads.read(grads.whole(name)) for name in grads.names()},
        {name: state.read(state.whole(stored)) for name, stored in params.items()},
    )

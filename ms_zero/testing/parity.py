"""Does a layout train like plain single-process training? The harness behind ``scripts/parity.py``.

A case is a run config with overrides and a number of workers. It is trained by the real trainer; the
reference (:mod:`ms_zero.testing.reference`) trains the same model on the same samples without any of the
engine. Compared are loss and gradient norm of each step, the gradient of every parameter in one step and
every parameter at the end; loss scales have to be equal, and every rank has to report the same. Workers hand
over tensors as the checkpoint shards that their engine reports, so the harness needs to know nothing about a
layout.

A case in 16 bits is compared twice: closely with a reference that rounds at the same places, which shows
errors of the engine, and widely with fp32 training, which shows what 16 bits cost. Once a step was skipped
the second comparison is left out, because then the two have taken different steps.

Cases of one ``group`` have to agree with each other in every bit.

Measures of difference:

- loss, gradient norm: ``|a - b| / |b|`` per step.
- tensors: ``max |a - b| / max(max |b|, floor)`` per parameter. The floor is 1e-3 of the largest element of
  all parameters or gradients, so that a parameter whose true gradient is zero (a key bias, which softmax
  cancels) is not compared by its rounding noise alone.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn

from ms_zero._compat import device_target
from ms_zero.checkpoint import Shard, latest, open_checkpoint, save
from ms_zero.comm import Communicator
from ms_zero.config import RunConfig, load_config
from ms_zero.errors import UserError
from ms_zero.models.init import decay_names, initialise
from ms_zero.precision.autocast import apply as autocast
from ms_zero.precision.autocast import fp32_parameters
from ms_zero.recipes.build import build_model, build_policy, build_resets
from ms_zero.runner import build_batch_schedule, build_schedule, build_trainer, load_data
from ms_zero.testing.reference import Half, PlainScale, ReferenceRun
from ms_zero.testing.workers import run_workers

FLOOR = 1e-3
_TIMEOUT_S = 7200


@dataclass(frozen=True)
class Case:
    """One layout to compare.

    Attributes:
        name: what the table shows.
        world_size: number of workers.
        base: path or preset name of the run config.
        problem: overrides that define what is trained; cases with equal base and problem share a reference.
        layout: overrides that must not change the result.
        frozen: patterns (``fnmatch``) of the names of parameters that are not trained.
        group: cases with the same text have to agree in every bit; "": compared with the references only.
    """

    name: str
    world_size: int
    base: str
    problem: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    group: str = ""

    def config(self) -> RunConfig:
        """The whole configuration."""
        return load_config(self.base, [*self.problem, *self.layout], self.world_size).config

    def reference(self) -> "Reference":
        """The plain training that the case is compared with."""
        config = self.config()
        micro_batch_size = 0 if config.precision.compute == "fp32" else config.train.micro_batch_size
        return Reference(self.base, self.problem, self.frozen, micro_batch_size)


@dataclass(frozen=True)
class Reference:
    """One plain training; ``micro_batch_size`` is 0 in fp32, which has no roundings to repeat."""

    base: str
    problem: tuple[str, ...]
    frozen: tuple[str, ...]
    micro_batch_size: int

    def in_fp32(self) -> "Reference":
        """The same without its choice of precision."""
        problem = tuple(item for item in self.problem if not item.startswith("precision."))
        return Reference(self.base, problem, self.frozen, 0)


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
    """The largest differences of one case, and the first one beyond the tolerance.

    Attributes:
        case: what was trained.
        precision: dtype of its computation.
        max_rel: largest difference of each kind from the reference; "fp32 ...": from that in fp32.
        divergence: the first one beyond the tolerance.
        digests: hash of each kind of result.
        scales: loss scale of each step.
        skipped: number of steps whose gradient was not finite.
    """

    case: Case
    precision: str = "fp32"
    max_rel: dict[str, float] = field(default_factory=dict)
    divergence: Divergence | None = None
    digests: dict[str, str] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    skipped: int = 0

    def note(self, kind: str, difference: float, tolerance: float, divergence: Divergence) -> None:
        """Record one comparison; a difference above the tolerance diverges, and nan counts as infinite."""
        if math.isnan(difference):
            difference = math.inf
        self.max_rel[kind] = max(self.max_rel.get(kind, 0.0), difference)
        if difference > tolerance and self.divergence is None:
            self.divergence = divergence


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted differences; ``first``: of loss and gradient norm in the first step."""

    loss: float = 1e-5
    grad_norm: float = 1e-5
    grad: float = 1e-5
    param: float = 1e-5
    first: float = 1e-5


TOLERANCES = {
    "fp32": Tolerance(),
    "bf16": Tolerance(loss=2e-4, grad_norm=5e-3, param=5e-3),
    "fp16": Tolerance(loss=2e-5, grad_norm=2e-3, param=1e-3),
}
"""By precision: from the reference that rounds at the same places.

The first step, with its gradient, agrees to fp32 accuracy in every precision. Its update differs in the last
bit of some fp32 master weights, because the reference updates in fp64, and where a master weight lies midway
between two 16-bit values that moves the stored one by a unit in the last place (2^-8 of it in bf16, 2^-11 in
fp16). More of them follow over the steps, so that what comes later agrees to the size of such units only.
"""
FP32_TOLERANCES = {
    "bf16": Tolerance(loss=1e-3, grad_norm=2e-2, grad=2.5e-2, param=2e-2, first=1.0),
    "fp16": Tolerance(loss=1e-4, grad_norm=2e-3, grad=4e-3, param=5e-3, first=1.0),
}
"""By precision: from training in fp32, that is, what rounding to 16 bits costs in 20 steps."""


@dataclass(frozen=True)
class Trace:
    """What a training left behind: numbers of each step, and tensors by logical name."""

    losses: list[float]
    grad_norms: list[float]
    scales: list[float]
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]

    def digests(self) -> dict[str, str]:
        """A hash of each kind of result; equal exactly when all bits are."""
        numbers = {"loss": self.losses, "grad_norm": self.grad_norms, "scale": self.scales}
        tensors = {"grad": self.grads, "param": self.params}
        return {
            **{kind: _digest([np.array(values)]) for kind, values in numbers.items()},
            **{kind: _digest(found[name] for name in sorted(found)) for kind, found in tensors.items()},
        }


@dataclass(frozen=True)
class Plan:
    """How long cases are trained.

    Attributes:
        steps: number of steps.
        gradient_step: counted from 1; the first step from here on that is not skipped is the one whose
            gradients are compared.
        tolerances: by precision.
        fp32_tolerances: by precision.
    """

    steps: int
    gradient_step: int = 2
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCES)
    fp32_tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: FP32_TOLERANCES)


def run_cases(cases: Sequence[Case], plan: Plan) -> Iterator[Result]:
    """Train all cases and compare each with its references; cases of one world size share one job."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        scratch = Path(folder)
        references = _train_references(cases, plan, scratch)
        for world_size in sorted({case.world_size for case in cases}):
            members = [case for case in cases if case.world_size == world_size]
            jobs = [_job(case, scratch / f"{world_size}-{i}") for i, case in enumerate(members)]
            arguments = (jobs, plan.steps, plan.gradient_step)
            found = run_workers(world_size, train_cases, *arguments, timeout_s=_TIMEOUT_S)
            for case, job, numbers in zip(members, jobs, zip(*found, strict=True), strict=True):
                yield _judge(case, _read_trace(numbers[0], Path(job["folder"])), numbers, references, plan)


def _judge(
    case: Case,
    trace: Trace,
    numbers: Sequence[dict[str, list[float]]],
    references: Mapping[Reference, Trace],
    plan: Plan,
) -> Result:
    """Compare a case with its references, and its ranks with each other."""
    precision, own = case.config().precision.compute, case.reference()
    skipped = sum(not math.isfinite(norm) for norm in trace.grad_norms)
    result = Result(
        case, precision, digests=trace.digests(), scales=tuple(trace.scales), skipped=skipped
    )
    odd = [rank for rank, found in enumerate(numbers) if json.dumps(found) != json.dumps(numbers[0])]
    if odd:
        result.divergence = Divergence("report", f"rank {odd[0]}, other than rank 0", math.nan, math.nan)
    compare(result, trace, references[own], plan.tolerances[precision])
    if own.micro_batch_size and not skipped:
        tolerance = plan.fp32_tolerances[precision]
        compare(result, trace, references[own.in_fp32()], tolerance, prefix="fp32 ")
    return result


def compare(
    result: Result, trace: Trace, reference: Trace, tolerance: Tolerance, *, prefix: str = ""
) -> Result:
    """Compare what was trained step by step and tensor by tensor; ``prefix`` goes before each kind."""
    assert len(trace.losses) == len(reference.losses), "runs of different length"
    for step in range(len(reference.losses)):
        for kind in ("loss", "grad_norm") if prefix else ("loss", "grad_norm", "scale"):
            _compare_step(result, kind, step, trace, reference, tolerance, prefix=prefix)
    _compare_tensors(result, f"{prefix}grad", trace.grads, reference.grads, tolerance.grad)
    _compare_tensors(result, f"{prefix}param", trace.params, reference.params, tolerance.param)
    return result


def bitwise_groups(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The cases of each group with at least two members."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.case.group:
            groups.setdefault(result.case.group, []).append(result)
    return {name: members for name, members in groups.items() if len(members) > 1}


def bitwise_difference(members: Sequence[Result]) -> str:
    """The first two cases of a group that differ in a bit, and where; "" when none do."""
    first = members[0]
    for other in members[1:]:
        kinds = [kind for kind, digest in other.digests.items() if digest != first.digests[kind]]
        if kinds:
            return f"{first.case.name} and {other.case.name} differ in {', '.join(kinds)}"
    return ""


def scale_histories(results: Iterable[Result]) -> dict[Reference, set[tuple[float, ...]]]:
    """The loss scales over the steps that each problem has met; one set member unless layouts disagree.

    The size of a microbatch is part of the problem: fp16 gradients are summed over it, and may overflow.
    """
    found: dict[Reference, set[tuple[float, ...]]] = {}
    for result in results:
        found.setdefault(result.case.reference(), set()).add(result.scales)
    return found


_SERIES = {"loss": "losses", "grad_norm": "grad_norms", "scale": "scales"}


def _compare_step(
    result: Result, kind: str, step: int, trace: Trace, reference: Trace, tolerance: Tolerance, *, prefix: str
) -> None:
    value, expected = (getattr(each, _SERIES[kind])[step] for each in (trace, reference))
    limit = 0.0 if kind == "scale" else getattr(tolerance, kind)
    if step == 0:
        limit = min(limit, tolerance.first)
    divergence = Divergence(prefix + kind, f"step {step + 1}", value, expected)
    result.note(prefix + kind, _relative(value, expected), limit, divergence)


def _relative(value: float, reference: float) -> float:
    if not (math.isfinite(value) or math.isfinite(reference)):
        return 0.0  # which of inf and nan an overflow gives is not specified
    return abs(value - reference) / abs(reference) if reference else abs(value)


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


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _job(case: Case, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    overrides = [*case.problem, *case.layout]
    return {"base": case.base, "overrides": overrides, "frozen": case.frozen, "folder": str(folder)}


def _train_references(cases: Sequence[Case], plan: Plan, scratch: Path) -> dict[Reference, Trace]:
    own = [case.reference() for case in cases]
    wanted = list(dict.fromkeys([*own, *(reference.in_fp32() for reference in own)]))
    jobs = []
    for number, each in enumerate(wanted):
        case = Case("reference", 1, each.base, each.problem, frozen=each.frozen)
        job = _job(case, scratch / f"reference-{number}")
        jobs.append({**job, "micro_batch_size": each.micro_batch_size})
    arguments = (jobs, plan.steps, plan.gradient_step)
    (scalars,) = run_workers(1, train_references, *arguments, timeout_s=_TIMEOUT_S)
    traces = {}
    for reference, job, numbers in zip(wanted, jobs, scalars, strict=True):
        grads, params = (dict(np.load(Path(job["folder"]) / f"{kind}.npz")) for kind in ("grads", "params"))
        traces[reference] = Trace(**numbers, grads=grads, params=params)
    return traces


def train_references(comm: Communicator, jobs: list[dict], steps: int, gradient_step: int) -> list:
    """Worker: train each job's problem plainly; returns the numbers of each step, saves tensors."""
    return [_train_reference(job, steps, gradient_step) for job in jobs]


def _train_reference(job: dict, steps: int, gradient_step: int) -> dict[str, list[float]]:
    config = load_config(job["base"], job["overrides"]).config
    run = _plain_run(config, job["frozen"], job["micro_batch_size"])
    numbers: dict[str, list[float]] = {"losses": [], "grad_norms": [], "scales": []}
    grads = None
    for step, made in enumerate(run.steps(steps, build_batch_schedule(config.train)), start=1):
        numbers["losses"].append(made.loss)
        numbers["grad_norms"].append(made.grad_norm)
        numbers["scales"].append(made.scale)
        if grads is None and step >= gradient_step and math.isfinite(made.grad_norm):
            grads = made.grads
    np.savez(Path(job["folder"]) / "grads.npz", **(grads or {}))
    np.savez(Path(job["folder"]) / "params.npz", **run.parameters())
    return numbers


def _plain_run(config: RunConfig, frozen: Sequence[str], micro_batch_size: int) -> ReferenceRun:
    model = build_model(config.model)
    _freeze(model, frozen)
    initialise(model, config.train.seed)
    half = None
    if micro_batch_size:
        policy = build_policy(config.precision)
        half = Half(policy.param, fp32_parameters(model), micro_batch_size)
        autocast(model, policy, device_target())
    return ReferenceRun(
        model,
        load_data(config).train_loader(config.train.seed),
        build_schedule(config),
        config.optim,
        decay_names(model),
        resets=build_resets(config.data),
        seed=config.train.seed,
        half=half,
        scale=PlainScale(config.precision),
        bias_speed=getattr(config.model, "router_bias_speed", 0.0),
    )


def _freeze(model: nn.Cell, patterns: Sequence[str]) -> None:
    for name, param in model.parameters_and_names():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            param.requires_grad = False


def train_cases(comm: Communicator, jobs: list[dict], steps: int, gradient_step: int) -> list:
    """Worker: train each job with the real trainer; returns the numbers of each step, saves tensors."""
    return [_train_case(comm, job, steps, gradient_step) for job in jobs]


def _train_case(comm: Communicator, job: dict, steps: int, gradient_step: int) -> dict[str, list[float]]:
    config = load_config(job["base"], job["overrides"], comm.world_size).config
    model = build_model(config.model)
    _freeze(model, job["frozen"])
    trainer = build_trainer(config, load_data(config), comm, model)
    folder, sharded = Path(job["folder"]), trainer.engine.sharded
    kept: list[int] = []

    def keep_gradients() -> None:
        step = trainer.progress.step + 1
        if not kept and step >= gradient_step and math.isfinite(sharded.sum_of_squares()):
            kept.append(step)
            _save_shards(comm, folder / "grads", trainer.engine.gradient_shards())

    numbers: dict[str, list[float]] = {"losses": [], "grad_norms": [], "scales": []}
    for _ in range(steps):
        numbers["scales"].append(sharded.loss_scale)
        result = trainer.step(on_gradient=keep_gradients)
        numbers["losses"].append(result.loss)
        numbers["grad_norms"].append(result.grad_norm)
    _save_shards(comm, folder / "params", trainer.engine.state_shards())
    trainer.engine.optimizer.close()
    return numbers


def _save_shards(comm: Communicator, root: Path, shards: Iterable[tuple[Shard, np.ndarray]]) -> None:
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    save(root, 0, shards, {}, exchange=comm.exchange, barrier=comm.barrier, **ranks)


def _read_trace(numbers: dict[str, list[float]], folder: Path) -> Trace:
    if latest(folder / "grads") is None:
        raise UserError("parity: the gradient of no step was finite, so there is none to compare: add steps")
    grads, state = (open_checkpoint(latest(folder / kind)) for kind in ("grads", "params"))
    params = {name.removeprefix("model."): name for name in state.names() if name.startswith("model.")}
    return Trace(
        **numbers,
        grads={name: grads.read(grads.whole(name)) for name in grads.names()},
        params={name: state.read(state.whole(stored)) for name, stored in params.items()},
    )

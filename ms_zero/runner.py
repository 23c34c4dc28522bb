"""One training run from start to end: resume, steps, evaluation, checkpoints, log, graceful stop."""

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

from mindspore import nn

from ms_zero.checkpoint import latest, open_checkpoint, prune, save
from ms_zero.comm import Communicator, ProcessMesh, checked, own_address
from ms_zero.config import (
    HardwareConfig,
    Loaded,
    RunConfig,
    TrainConfig,
    dump,
    mesh_of,
    render_effective,
    require_runnable,
)
from ms_zero.data import BatchSchedule, MixtureData, TextData
from ms_zero.data.run import load_data
from ms_zero.errors import UserError
from ms_zero.graph.build import build_compiled_engine, build_graph_engine, needs_auto_parallel
from ms_zero.graph.engine import GraphEngine
from ms_zero.hardware import peak_flops
from ms_zero.kernels import default_target, require_built
from ms_zero.monitor import Monitor, Rates, StepRecord, Throughput, host_rss_bytes
from ms_zero.optim.schedule import Schedule
from ms_zero.plan.flops import train_flops_per_token
from ms_zero.recipes.account import account, sent_bytes
from ms_zero.recipes.build import DATA_AXES, build_engine, build_model, build_resets, build_scaler
from ms_zero.recipes.eager import EagerEngine
from ms_zero.trainer import StepResult, Trainer

# So many skipped steps in a row mean that the run is broken, not that one batch was unlucky. Steps whose
# overflow lets a dynamic loss scale fall do not count.
MAX_SKIPPED_IN_A_ROW = 10
CHECKPOINT_FOLDER = "checkpoints"


def run(loaded: Loaded, comm: Communicator) -> int:
    """Train as configured; every worker of the job calls this.

    Returns:
        0 when the run is complete, or was stopped by SIGTERM or SIGINT after saving.

    Raises:
        UserError: bad data, checkpoint or environment, or a config that this version cannot run.
    """
    loaded.require_runnable()
    hardware = loaded.config.hardware
    kernels = _kernels_of(hardware)
    debug = checked(comm, own_address()) if loaded.config.train.debug_collectives else nullcontext(comm)
    with kernels, debug as comm, closing(_Session(loaded, comm)) as session:
        session.introduce(loaded)
        session.resume()
        with _stop_on_signals() as stop:  # not before: until here there is nothing to save
            session.train(stop)
    return 0


def _kernels_of(hardware: HardwareConfig) -> AbstractContextManager[None]:
    """Within it, operations find the kernels that the run asks for; UserError when they are missing."""
    if hardware.kernels == "native":
        return nullcontext()
    target = f"{hardware.target}-{hardware.kernels}"
    if hardware.kernels == "custom":
        require_built(target)
    return default_target(target)


def build_trainer(
    config: RunConfig, text: TextData | MixtureData, comm: Communicator, model: nn.Cell | None = None
) -> Trainer:
    """The trainer of a run, at step 0 with initial values; raises UserError for what cannot be run.

    ``model``: see :func:`ms_zero.recipes.build.build_engine`.
    """
    require_runnable(config)
    pmesh = ProcessMesh(mesh_of(config, comm.world_size), comm)
    train = config.train
    return Trainer(
        _build_engine(config, pmesh, model),
        text.train_loader(train.seed),
        build_schedule(config),
        comm=comm,
        group=pmesh.group(*DATA_AXES),
        batch_size=build_batch_schedule(train),
        micro_batch_size=train.micro_batch_size,
        clip_norm=config.optim.clip_norm,
    )


def _build_engine(
    config: RunConfig, pmesh: ProcessMesh, model: nn.Cell | None
) -> EagerEngine | GraphEngine:
    if config.engine.kind == "eager":
        return build_engine(config, pmesh, model)
    model = build_model(config.model) if model is None else model
    scaler, resets = build_scaler(config.precision), build_resets(config.data)
    if not needs_auto_parallel(config):
        return build_graph_engine(config, pmesh, model, scaler=scaler, resets=resets)
    folder = Path(config.train.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    schedule = build_schedule(config)
    parts = {"scaler": scaler, "schedule": schedule, "folder": folder, "resets": resets}
    return build_compiled_engine(config, pmesh, model, **parts)


def build_schedule(config: RunConfig) -> Schedule:
    """The learning rate of each update of a run."""
    optim = config.optim
    return Schedule(
        optim.schedule,
        lr=optim.lr,
        min_lr=optim.min_lr,
        warmup_steps=optim.warmup_steps,
        total_steps=config.train.steps,
        decay_steps=optim.decay_steps or 0,
    )


def build_batch_schedule(train: TrainConfig) -> BatchSchedule:
    """The samples of each step of a run."""
    return BatchSchedule(
        full=train.global_batch_size,
        start=train.rampup_start or 0,
        increment=train.rampup_increment or 0,
        samples=train.rampup_samples,
    )


class StopFlag:
    """Becomes true when the process is asked to end."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, signum: int, frame: object) -> None:
        """Signal handler; a second Ctrl-C ends the process at once."""
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def _stop_on_signals() -> Iterator[StopFlag]:
    """SIGTERM and SIGINT ask for an orderly end instead of killing the process."""
    stop = StopFlag()
    previous = {number: signal.signal(number, stop.request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Session:
    """The parts of one run and the order in which they are used."""

    def __init__(self, loaded: Loaded, comm: Communicator) -> None:
        config = self.config = loaded.config
        self.comm = comm
        self.has_account = False  # of what a step sends and holds
        self.output = Path(config.train.output_dir)
        self.text = load_data(config)
        _check_same_everywhere(comm, config, self.text)
        self.trainer = build_trainer(config, self.text, comm)
        self.validation = self.text.validation_loader() if config.train.eval_interval else None
        # What a model reaches that knows how often each token occurs and nothing else.
        self.entropy = None if self.validation is None else self.text.validation_entropy()
        # The last rank holds the last pipeline stage, and with it the loss, in every layout.
        prints = config.monitor.console and comm.rank == comm.world_size - 1
        jsonl = self.output / "logs" / f"metrics-{comm.rank:05d}.jsonl" if config.monitor.jsonl else None
        self.monitor = Monitor(sys.stdout if prints else None, jsonl)
        self.throughput = Throughput(
            num_devices=comm.world_size,
            flops_per_token=train_flops_per_token(config.model, config.data.seq_len),
            peak_flops=peak_flops(config.hardware.device, "fp32"),
        )

    def close(self) -> None:
        """Close the log."""
        self.monitor.close()

    def introduce(self, loaded: Loaded) -> None:
        """Say what is about to be trained on what."""
        train = self.config.train
        self.monitor.note("run", config=render_effective(loaded), world_size=loaded.world_size)
        self.monitor.message(self.text.summary())
        self.monitor.message(
            f"{train.global_batch_size} samples a step: micro batch {train.micro_batch_size} x accumulation "
            f"{train.accumulation_steps} x data-parallel degree {self.trainer.num_replicas}"
        )
        for note in self.trainer.engine.notes:
            self.monitor.message(note)
        for warning in loaded.warnings:
            self.monitor.message(f"warning: {warning}")

    def resume(self) -> None:
        """Load the checkpoint that the config asks for."""
        path = self._checkpoint_to_resume()
        if path is None:
            return
        checkpoint = open_checkpoint(path)
        self.trainer.load_state(checkpoint.state)
        self.trainer.engine.load_state(checkpoint)
        saved, own = checkpoint.state.get("loss_scale"), self.trainer.engine.sharded.scaler.state()
        if saved and saved["kind"] != own["kind"]:
            self.monitor.message(
                f"warning: the checkpoint has the state of a {saved['kind']}, this run uses a {own['kind']}: "
                f"the loss scale starts at {own['scale']:g}"
            )
        self.monitor.event("resume", path=str(path), step=self.trainer.progress.step)

    def _checkpoint_to_resume(self) -> Path | None:
        wanted = self.config.checkpoint.resume
        if wanted == "never":
            return None
        if wanted != "auto":
            return Path(wanted)
        return latest(self.output / CHECKPOINT_FOLDER, on_skip=self.monitor.message)

    def train(self, stop: StopFlag) -> None:
        """Step until the end or until somebody asks to stop; save at the end either way."""
        steps, progress = self.config.train.steps, self.trainer.progress
        if progress.step >= steps:
            self.monitor.message(f"nothing to do: {progress.step} of {steps} steps are done")
            return
        saved_step = progress.step
        while progress.step < steps:
            result = self._timed_step(stop)
            _check_health(self.trainer.engine.sharded.scaler.skips_at_minimum, result)
            if self._is_due(self.config.train.eval_interval, result):
                with self.throughput.paused():
                    self._evaluate()
            if self._is_due(self.config.checkpoint.interval, result) or result.stop:
                with self.throughput.paused():
                    self._save()
                saved_step = result.step
            if result.stop:
                self.monitor.message(f"stopped on request after step {result.step} of {steps}, saved")
                return
        if saved_step != progress.step:
            self._save()

    def _is_due(self, interval: int, result: StepResult) -> bool:
        """True every ``interval`` steps and at the last; 0 is never."""
        return interval > 0 and (result.step % interval == 0 or result.step == self.config.train.steps)

    def _timed_step(self, stop: StopFlag) -> StepResult:
        sent_before = self._sent_bytes()
        result = self.trainer.step(stop_requested=stop.requested)
        if result.nonfinite is None and not self.has_account:
            self._account(result, self._sent_bytes() - sent_before)
        rates = self.throughput.step(result.num_samples * self.config.data.seq_len)
        if result.nonfinite:
            self.monitor.event(
                "skipped_step",
                step=result.step,
                first_nonfinite=result.nonfinite,
                skipped=self.trainer.progress.skipped,
                loss_scale=self.trainer.engine.sharded.loss_scale,
            )
        if result.step % self.config.train.log_interval == 0 or result.step == self.config.train.steps:
            self.monitor.log(self._record(result, rates))
        return result

    def _sent_bytes(self) -> int:
        """What the engine has counted so far; collectives inside graphs are not."""
        engine = self.trainer.engine
        return 0 if isinstance(engine, GraphEngine) else sent_bytes(self.comm.counters, engine.sharded)

    def _account(self, result: StepResult, sent: int) -> None:
        """Tell once what a step sends and holds, beside the theory."""
        rows = self.config.train.micro_batch_size * self.trainer.num_replicas
        engine = self.trainer.engine
        if isinstance(engine, GraphEngine):
            found = engine.account()
        else:
            count = result.num_samples // rows
            found = account(engine.sharded, engine.optimizer, sent=sent, num_microbatches=count)
        for line in found.lines():
            self.monitor.message(line)
        self.monitor.note("account", **found.fields())
        self.has_account = True

    def _record(self, result: StepResult, rates: Rates) -> StepRecord:
        progress, steps = self.trainer.progress, self.config.train.steps
        return StepRecord(
            step=result.step,
            total_steps=steps,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_samples * self.config.data.seq_len,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_second_per_device=rates.tokens_per_second_per_device,
            tflops_per_device=rates.tflops_per_device,
            mfu=rates.mfu,
            memory_bytes=host_rss_bytes(),
            eta_seconds=rates.eta_seconds(steps - result.step),
        )

    def _evaluate(self) -> None:
        loss = self.trainer.evaluate(self.validation, self.config.train.eval_samples)
        step = self.trainer.progress.step
        self.monitor.event("validation", step=step, loss=loss, unigram_entropy=self.entropy)

    def _save(self) -> None:
        root, comm, step = self.output / CHECKPOINT_FOLDER, self.comm, self.trainer.progress.step
        state = {
            **self.trainer.state(),
            # Every random stream is a function of the seed and of names and counters: this is all its state.
            "rng": {"seed": self.config.train.seed},
            "config": dump(self.config),
            "world_size": comm.world_size,
        }
        shards = self.trainer.engine.state_shards()
        path = save(
            root,
            step,
            shards,
            state,
            rank=comm.rank,
            world_size=comm.world_size,
            exchange=comm.exchange,
            barrier=comm.barrier,
        )
        if comm.rank == 0:
            prune(root, self.config.checkpoint.keep)
        self.monitor.event("checkpoint", step=step, path=str(path))


def _check_same_everywhere(comm: Communicator, config: RunConfig, text: TextData | MixtureData) -> None:
    """Refuse workers that would train different things: other values in the config, or other text."""
    views = comm.exchange([dump(config), text.fingerprint])
    for rank, (values, fingerprint) in enumerate(views):
        if values != views[0][0]:
            raise UserError(f"rank {rank} has another config than rank 0: start all with the same one")
        if fingerprint != views[0][1]:
            raise UserError(
                f"rank {rank} reads other text than rank 0 ({text.corpus}): give all nodes the same files in "
                f"data.files and the same Python version"
            )


def _check_health(skipped_in_a_row: int, result: StepResult) -> None:
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise UserError(
            f"step {result.step}: {skipped_in_a_row} steps in a row had gradients that are not finite, first "
            f"{result.nonfinite}; nothing was applied: lower optim.lr (or a static precision.initial_scale) "
            f"or look at the data, then resume from the last checkpoint"
        )

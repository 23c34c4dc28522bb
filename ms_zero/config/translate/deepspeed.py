"""A DeepSpeed config (JSON) as a run file.

`auto` in such a file is a word of the Hugging Face integration, which fills it in from its own arguments.
"""

from collections.abc import Mapping
from typing import Any, Final

from ms_zero.config.findings import show
from ms_zero.config.translate.deepspeed_keys import (
    BATCH,
    BATCH_KEYS,
    OFFLOAD_KEYS,
    ONLY_BELOW_3,
    ONLY_STAGE_3,
    OTHER_KEYS,
    OTHER_SECTIONS,
    PRECISION_KEYS,
    SCHEDULES,
    TOOL,
    ZERO_KEYS,
)
from ms_zero.config.translate.result import RunNotes, Source, Translation
from ms_zero.config.translate.table import (
    Entry,
    No,
    Only,
    To,
    apply,
    dtype,
    finish_unknown,
    integer,
    number,
    put,
    whole,
)
from ms_zero.errors import UserError

_ZERO: Final = "zero_optimization"
_MIB: Final = 2**20
_PROGRAM: Final = "the model's program decides about it in DeepSpeed, and memory.recompute here"


def translate_deepspeed(source: Source) -> Translation:
    """Translate a DeepSpeed config. Raises UserError where DeepSpeed itself refuses it."""
    notes = RunNotes(source.leaves)
    _unwrap_old_zero(notes)
    _auto(notes)
    _batch(notes)
    _precision(notes)
    _zero(notes, source.workers)
    _optimizer(notes)
    _scheduler(notes)
    _checkpointing(notes)
    _ulysses(notes)
    apply(notes, {**BATCH_KEYS, **PRECISION_KEYS, **OTHER_KEYS}, OTHER_SECTIONS)
    finish_unknown(notes, _known(), TOOL)
    return notes.result()


def _known() -> list[str]:
    zero = [f"{_ZERO}.{name}" for name in (*ZERO_KEYS, "stage", "reduce_bucket_size", "mics_shard_size")]
    offload = [
        f"{_ZERO}.{block}.{name}"
        for block in ("offload_optimizer", "offload_param")
        for name in (*OFFLOAD_KEYS, "device", "nvme_path", "ratio")
    ]
    optimizer = [f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "adam_w_mode")]
    scheduler = [f"scheduler.params.{name}" for name in _SCHEDULER_PARAMS]
    scaling = [f"fp16.{name}" for name in ("enabled", *_SCALING)]
    others = [*BATCH, *BATCH_KEYS, *PRECISION_KEYS, *OTHER_KEYS, *OTHER_SECTIONS, "bf16.enabled"]
    return [
        *zero,
        *offload,
        *optimizer,
        *scheduler,
        *scaling,
        *others,
        "optimizer.type",
        "scheduler.type",
        _ZERO,
    ]


def _unwrap_old_zero(notes: RunNotes) -> None:
    """`"zero_optimization": true` is how stage 1 was written once."""
    if isinstance(notes.get(_ZERO), bool):
        put(notes, _ZERO, "parallel.zero_stage", int, "the old form: true is stage 1")


def _auto(notes: RunNotes) -> None:
    for source in notes.left():
        if notes.get(source) != "auto":
            continue
        if source in BATCH:
            notes.same(
                source, "auto as well: two of the three batch sizes have to be given, the third follows"
            )
        elif source in _known():
            notes.drop(source, "auto: Hugging Face fills it in from its own arguments; set the value here")


def _batch(notes: RunNotes) -> None:
    """The batch triple means the same in both; DeepSpeed sets a missing accumulation to 1."""
    given = [source for source in BATCH if notes.has(source)]
    for source in given:
        put(notes, source, BATCH[source], whole)
    accumulation = "gradient_accumulation_steps"
    if accumulation not in notes.leaves and len(given) == 1:
        reason = "not given: DeepSpeed takes 1 when only one batch size is given"
        notes.default(accumulation, BATCH[accumulation], 1, reason)
    elif given == [accumulation] and not any(notes.get(source) == "auto" for source in BATCH):
        raise UserError(
            "train_batch_size: missing; DeepSpeed needs it or train_micro_batch_size_per_gpu beside "
            "gradient_accumulation_steps"
        )


_SCALING: Mapping[str, tuple[str, Any, Any]] = {
    "initial_scale_power": ("precision.initial_scale", lambda power: 2.0 ** integer(power), 16),
    "loss_scale_window": ("precision.growth_interval", whole, 1000),
    "hysteresis": ("precision.hysteresis", whole, 2),
    "min_loss_scale": ("precision.min_scale", number, 1),
}


def _precision(notes: RunNotes) -> None:
    for old in [source for source in notes.left() if source.startswith("bfloat16.")]:
        _rename(notes, old, old.replace("bfloat16.", "bf16.", 1))
    half, brain = notes.get("fp16.enabled") is True, notes.get("bf16.enabled") is True
    if half and brain:
        raise UserError("fp16.enabled and bf16.enabled are both true; DeepSpeed refuses that: keep one")
    for name, enabled in (("fp16", half), ("bf16", brain)):
        _precision_block(notes, name, enabled)
    model = "fp16" if half else "bf16" if brain else "fp32"
    if model != "fp32":
        reason = f"not given: DeepSpeed reduces gradients of {model} weights in {model}"
        if notes.has("communication_data_type"):
            put(notes, "communication_data_type", "precision.reduce", dtype)
        elif "communication_data_type" not in notes.leaves:
            notes.default("communication_data_type", "precision.reduce", model, reason)
        if "data_types.grad_accum_dtype" not in notes.leaves and (half or _stage(notes) > 0):
            reason = f"not given: DeepSpeed adds up gradients of {model} weights in {model}"
            notes.default("data_types.grad_accum_dtype", "precision.accumulate", model, reason)


def _rename(notes: RunNotes, old: str, new: str) -> None:
    value = notes.get(old)
    notes.same(old, f"the old name of {new}")
    notes.leaves[new] = value
    notes.add(new)


def _precision_block(notes: RunNotes, name: str, enabled: bool) -> None:
    switch = f"{name}.enabled"
    if notes.has(switch):
        if enabled:
            remark = "weights and compute in 16 bits, fp32 master weights"
            notes.put(switch, "precision.policy", name, remark)
        elif notes.get(switch) is False:
            notes.same(switch, "the policy is fp32 unless one of fp16 and bf16 is enabled")
        else:
            notes.drop(switch, f"{show(notes.get(switch))} is not true or false")
    if not enabled:
        for source in [item for item in notes.left() if item.startswith(f"{name}.")]:
            notes.ignored(source, f"only read when {switch} is true")
    elif name == "fp16":
        _loss_scale(notes)


def _loss_scale(notes: RunNotes) -> None:
    static = notes.get("fp16.loss_scale", 0)
    if notes.has("fp16.loss_scale"):
        dynamic = static == 0
        remark = "0 means dynamic in DeepSpeed" if dynamic else "a constant scale"
        notes.put("fp16.loss_scale", "precision.loss_scale", "dynamic" if dynamic else "static", remark)
    if static != 0:
        notes.default("fp16.loss_scale", "precision.initial_scale", static, "the constant scale")
        for name in _SCALING:
            if notes.has(f"fp16.{name}"):
                notes.ignored(f"fp16.{name}", "only read for a dynamic scale; fp16.loss_scale is constant")
        return
    reason = "not given: the default of DeepSpeed"
    for name, (target, convert, standard) in _SCALING.items():
        if notes.has(f"fp16.{name}"):
            put(notes, f"fp16.{name}", target, convert)
        elif f"fp16.{name}" not in notes.leaves:
            notes.default(f"fp16.{name}", target, convert(standard), reason)
    reason = "the scale doubles on the clean step after the window, then every window"
    notes.default("fp16.loss_scale_window", "precision.loss_scale_convention", "deepspeed", reason)


def _stage(notes: RunNotes) -> int:
    stage = notes.get(f"{_ZERO}.stage", int(notes.get(_ZERO) is True))
    return stage if isinstance(stage, int) else 0


def _zero(notes: RunNotes, workers: int | None) -> None:
    stage = _stage(notes)
    if notes.has(f"{_ZERO}.stage"):
        put(notes, f"{_ZERO}.stage", "parallel.zero_stage", whole)
    elif any(source.startswith(f"{_ZERO}.") for source in notes.leaves):
        reason = "not given: DeepSpeed takes stage 0"
        notes.default(f"{_ZERO}.stage", "parallel.zero_stage", 0, reason)
    _zero_ignored(notes, stage)
    size = f"{_ZERO}.reduce_bucket_size"
    if notes.has(size):
        bytes_each = _stored_bytes(notes)
        remark = f"elements of {bytes_each} bytes as weights are stored, in MiB"
        put(notes, size, "parallel.bucket_mb", lambda elements: number(elements) * bytes_each / _MIB, remark)
    _prefetch(notes)
    _mics(notes, workers)
    _offload(notes, stage)
    apply(notes, {f"{_ZERO}.{name}": entry for name, entry in ZERO_KEYS.items()})


def _zero_ignored(notes: RunNotes, stage: int) -> None:
    for source in [item for item in notes.left() if item.startswith(f"{_ZERO}.")]:
        name = source.removeprefix(f"{_ZERO}.")
        known = source in _known()
        if name == "stage" or not known:
            continue
        if stage == 0:
            notes.ignored(source, "only read when ZeRO is on, but the stage is 0")
        elif stage < 3 and name.startswith(ONLY_STAGE_3):
            notes.ignored(source, f"only read at stage 3, but the stage is {stage}")
        elif stage == 3 and name.startswith(ONLY_BELOW_3):
            notes.ignored(source, "only read at stages 1 and 2, but the stage is 3")


def _stored_bytes(notes: RunNotes) -> int:
    """Bytes of a stored weight under the policy that has been written."""
    return 4 if notes.value("precision.policy") in (None, "fp32") else 2


def _prefetch(notes: RunNotes) -> None:
    source = f"{_ZERO}.stage3_prefetch_bucket_size"
    if notes.has(source) and notes.get(source) == 0:
        notes.put(source, "parallel.prefetch", 0, "nothing is gathered ahead")
    elif notes.has(source):
        notes.drop(source, "counts elements; parallel.prefetch counts units, and keeps its default")


def _mics(notes: RunNotes, workers: int | None) -> None:
    source = f"{_ZERO}.mics_shard_size"
    size = notes.get(source)
    if not notes.has(source):
        return
    if not isinstance(size, int) or size < 1:
        notes.same(source, "all data-parallel workers share one copy")
        return
    replicas = workers // size if workers is not None and workers % size == 0 else None
    remark = "MiCS is hybrid sharding"
    if replicas is None:
        remark += "; set parallel.dp_replicate to workers / dp_shard (tell --workers)"
    if notes.put(source, "parallel.dp_shard", size, remark) and replicas is not None:
        notes.default(source, "parallel.dp_replicate", replicas, f"{workers} workers / {size}")


def _offload(notes: RunNotes, stage: int) -> None:
    for old, new in (("cpu_offload", "offload.optimizer"), ("cpu_offload_param", "offload.params")):
        source = f"{_ZERO}.{old}"
        if notes.has(source):
            put(notes, source, new, lambda on: "cpu" if on else "none", "the old form")
    _offload_optimizer(notes, stage)
    block = f"{_ZERO}.offload_param"
    device = notes.get(f"{block}.device", "none")
    if notes.has(f"{block}.device"):
        notes.put(f"{block}.device", "offload.params", device)
    if notes.has(f"{block}.nvme_path"):
        _path(notes, f"{block}.nvme_path", device)
    for name in ("offload_optimizer", "offload_param"):
        if notes.get(f"{_ZERO}.{name}") == {} and notes.has(f"{_ZERO}.{name}"):
            notes.same(f"{_ZERO}.{name}", "no device, so nothing is offloaded")
        apply(notes, {f"{_ZERO}.{name}.{key}": entry for key, entry in OFFLOAD_KEYS.items()})


def _offload_optimizer(notes: RunNotes, stage: int) -> None:
    block = f"{_ZERO}.offload_optimizer"
    device = notes.get(f"{block}.device", "none")
    if notes.has(f"{block}.device"):
        if device == "nvme" and stage < 3:
            notes.put(f"{block}.device", "offload.optimizer", "cpu")
            notes.ignored(
                f"{block}.device", f"nvme needs stage 3; at stage {stage} DeepSpeed uses host memory"
            )
            device = "cpu"
        else:
            notes.put(f"{block}.device", "offload.optimizer", device)
    if notes.has(f"{block}.ratio"):
        if device == "none":
            notes.ignored(f"{block}.ratio", "only read when the optimizer is offloaded")
        elif stage < 3 and notes.get(f"{block}.ratio") != 1:
            raise UserError(f"{block}.ratio: below 1 needs ZeRO stage 3 in DeepSpeed; the stage is {stage}")
        else:
            put(notes, f"{block}.ratio", "offload.fraction", number)
    if notes.has(f"{block}.nvme_path"):
        _path(notes, f"{block}.nvme_path", device)


def _path(notes: RunNotes, source: str, device: Any) -> None:
    if device == "nvme":
        notes.put(source, "offload.nvme_path", notes.get(source))
    else:
        notes.ignored(source, f"only read for device nvme, but the device is {device}")


_ADAM = {"adam": "Adam", "adamw": "AdamW"}
_ADAM_DEFAULTS = {"optim.beta1": 0.9, "optim.beta2": 0.999, "optim.eps": 1e-8, "optim.weight_decay": 0.0}
_DECAYED = "DeepSpeed decays every parameter of a group; norms, biases and embeddings have no decay here"


def _optimizer(notes: RunNotes) -> None:
    kind = notes.get("optimizer.type")
    name = str(kind).lower()
    if kind is None or not notes.has("optimizer.type"):
        return
    l2 = name == "adam" and notes.get("optimizer.params.adam_w_mode") is False
    if name in _ADAM and not l2:
        _adam(notes, name)
    elif name == "sgd":
        notes.put("optimizer.type", "optim.kind", "sgd")
        zero = "optimizer.params.momentum"
        apply(notes, {zero: Only(0, "plain SGD", "sgd here has no momentum"), **_common_params()})
    else:
        what = "Adam with L2 decay in the gradient" if l2 else show(kind)
        notes.drop("optimizer.type", f"{what} is not offered; optim.kind is adamw or sgd")
        for source in [item for item in notes.left() if item.startswith("optimizer.")]:
            notes.drop(source, f"belongs to {what}")
        return
    if "gradient_clipping" not in notes.leaves:
        notes.default("gradient_clipping", "optim.clip_norm", 0.0, "not given: DeepSpeed does not clip")


def _adam(notes: RunNotes, name: str) -> None:
    remark = "adam_w_mode is true by default in DeepSpeed: decay is decoupled" if name == "adam" else ""
    notes.put("optimizer.type", "optim.kind", "adamw", remark)
    mode = "optimizer.params.adam_w_mode"
    if notes.has(mode) and name == "adamw":
        notes.ignored(mode, "DeepSpeed does not read it for AdamW: decay is decoupled")
    elif notes.has(mode):
        notes.same(mode, "decay is decoupled")
    betas = notes.get("optimizer.params.betas")
    if notes.has("optimizer.params.betas"):
        if isinstance(betas, list) and len(betas) == 2:
            notes.put("optimizer.params.betas", "optim.beta1", betas[0])
            notes.put("optimizer.params.betas", "optim.beta2", betas[1])
        else:
            notes.drop("optimizer.params.betas", f"{show(betas)} is not two numbers")
    off = Only(False, "one AdamW", "this variant is not offered")
    bias = Only(True, "moments are bias-corrected", "moments are always bias-corrected")
    apply(
        notes, {"optimizer.params.amsgrad": off, "optimizer.params.bias_correction": bias, **_common_params()}
    )
    for target, value in _ADAM_DEFAULTS.items():
        source = "betas" if "beta" in target else target.partition(".")[2]
        if f"optimizer.params.{source}" not in notes.leaves:
            notes.default(f"optimizer.params.{source}", target, value, f"not given: {value} in DeepSpeed")


def _common_params() -> dict[str, Entry]:
    return {
        "optimizer.params.lr": To("optim.lr", number),
        "optimizer.params.eps": To("optim.eps", number),
        "optimizer.params.weight_decay": To("optim.weight_decay", number, _DECAYED),
        "optimizer.params.max_grad_norm": No("DeepSpeed refuses it; the limit is gradient_clipping"),
    }


_SCHEDULER_PARAMS = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
    "total_num_steps",
    "warmup_min_ratio",
    "cos_min_ratio",
    "last_batch_iteration",
)


def _scheduler(notes: RunNotes) -> None:
    if not notes.has("scheduler.type"):
        return
    kind = str(notes.get("scheduler.type"))
    if kind not in SCHEDULES:
        notes.drop("scheduler.type", f"{show(kind)} is not offered; see optim.schedule")
        for source in [item for item in notes.left() if item.startswith("scheduler.")]:
            notes.drop(source, f"belongs to {show(kind)}")
        return
    notes.put("scheduler.type", "optim.schedule", SCHEDULES[kind])
    _warmup(notes, kind)
    _peak(notes, kind)
    at = "scheduler.params."
    total = f"{at}total_num_steps"
    if notes.has(total):
        put(
            notes,
            total,
            "train.steps",
            whole,
            "the decay ends with the run: optim.schedule has no length of its own",
        )
    if kind == "WarmupDecayLR":
        notes.default("scheduler.type", "optim.min_lr", 0.0, "WarmupDecayLR ends at zero")
    apply(
        notes, {f"{at}last_batch_iteration": Only(-1, "a run starts at step 0", "resuming restores the step")}
    )


def _warmup(notes: RunNotes, kind: str) -> None:
    at = "scheduler.params."
    shape = f"{at}warmup_type"
    logarithmic = notes.get(shape, "log") == "log"
    steps = 2 if kind == "WarmupCosineLR" else 1000
    if notes.has(f"{at}warmup_num_steps"):
        put(notes, f"{at}warmup_num_steps", "optim.warmup_steps", whole)
    elif f"{at}warmup_num_steps" not in notes.leaves:
        reason = f"not given: {steps} in DeepSpeed"
        notes.default(f"{at}warmup_num_steps", "optim.warmup_steps", steps, reason)
    if notes.has(shape) and not logarithmic:
        notes.same(shape, "the warm-up is linear")
    elif notes.has(shape) or shape not in notes.leaves:
        notes.drop(shape, "log, the default of DeepSpeed, rises faster at first; the warm-up here is linear")
    low = Only(0, "the warm-up starts at zero", "the warm-up here starts at zero")
    apply(notes, {f"{at}warmup_min_lr": low, f"{at}warmup_min_ratio": low})


def _peak(notes: RunNotes, kind: str) -> None:
    at = "scheduler.params."
    peak, given = f"{at}warmup_max_lr", notes.value("optim.lr")
    if kind == "WarmupCosineLR":
        if notes.has(f"{at}cos_min_ratio") and given is None:
            notes.drop(f"{at}cos_min_ratio", "a share of optimizer.params.lr, which is not given")
        elif notes.has(f"{at}cos_min_ratio"):
            put(
                notes,
                f"{at}cos_min_ratio",
                "optim.min_lr",
                lambda ratio: number(ratio) * given,
                "a share of lr",
            )
        elif given is not None:
            notes.default(f"{at}cos_min_ratio", "optim.min_lr", 1e-4 * given, "not given: 1e-4 of lr")
        if notes.has(peak):
            notes.ignored(peak, "WarmupCosineLR scales the optimizer's lr")
        return
    if peak in notes.leaves and not notes.has(peak):  # auto
        return
    value = notes.get(peak, 1e-3)
    if given is not None and given != value:
        reason = f"{kind} sets the rate to warmup_max_lr {value}, whatever the optimizer's lr is"
        notes.replace("optimizer.params.lr", "optim.lr", "ignored", reason)
    if notes.has(peak):
        put(notes, peak, "optim.lr", number)
    else:
        notes.default(peak, "optim.lr", 1e-3, "not given: 1e-3 in DeepSpeed")


def _ulysses(notes: RunNotes) -> None:
    degree = notes.get("sequence_parallel_size", 1)
    if isinstance(degree, int) and degree > 1:
        notes.default("sequence_parallel_size", "parallel.context", "ulysses", "it is Ulysses")


def _checkpointing(notes: RunNotes) -> None:
    block = "activation_checkpointing."
    partitioned = notes.get(f"{block}partition_activations") is True
    offload = f"{block}cpu_checkpointing"
    if notes.has(offload) and notes.get(offload) is True:
        if partitioned:
            notes.put(offload, "memory.activations", "host", "what is kept for backward")
        else:
            notes.ignored(offload, "only read when partition_activations is true")
    plain = {
        name: Only(False, "saved inputs are kept whole on the device", reason)
        for name, reason in (
            (f"{block}partition_activations", "saved inputs are not split over tensor-parallel ranks"),
            (offload, _PROGRAM),
            (f"{block}contiguous_memory_optimization", "saved inputs are allocated one by one"),
            (f"{block}synchronize_checkpoint_boundary", "a tool for debugging"),
            (f"{block}profile", "reports go to metrics.jsonl, see monitor"),
        )
    }
    number_of = f"{block}number_checkpoints"
    if notes.has(number_of) and notes.get(f"{block}contiguous_memory_optimization") is not True:
        notes.ignored(
            number_of, "only read with contiguous_memory_optimization; it does not turn recompute on"
        )
    apply(notes, plain)

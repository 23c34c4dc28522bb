"""A run file as a DeepSpeed config (JSON)."""

from collections.abc import Iterator, Mapping
from typing import Any

from ms_zero.config.findings import show
from ms_zero.config.translate.deepspeed_keys import BATCH, SCHEDULES
from ms_zero.config.translate.result import Notes, Translation
from ms_zero.config.translate.table import No, Only, To, apply, whole

_MIB = 2**20
_LONG = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}

_KEYS = {
    **{target: To(source) for source, target in BATCH.items()},
    "train.log_interval": To("steps_per_print"),
    "train.steps": No("DeepSpeed trains as long as the program calls it"),
    "optim.clip_norm": To("gradient_clipping"),
    "optim.beta1": To("optimizer.params.betas"),
    "optim.beta2": To("optimizer.params.betas"),
    "optim.eps": To("optimizer.params.eps"),
    "optim.weight_decay": To(
        "optimizer.params.weight_decay",
        remark="group the parameters in the program: norms, biases and embeddings have no decay here",
    ),
    "optim.decay_steps": No("belongs to the wsd schedule"),
    "parallel.zero_stage": To("zero_optimization.stage"),
    "parallel.pp": Only(1, "no pipeline", "DeepSpeed's pipeline is built by the program (PipelineModule)"),
    "parallel.cp": Only(
        1, "no context parallelism", "see sequence_parallel_size: it takes a model built for it"
    ),
    "parallel.tp": Only(
        1, "no tensor parallelism", "see tensor_parallel.autotp_size: it splits other layers"
    ),
    "parallel.prefetch": No("counts units; stage3_prefetch_bucket_size counts elements"),
    "parallel.reshard_after_forward": Only(
        True, "weights are released after use", "see stage3_max_reuse_distance, which counts elements"
    ),
    "parallel.sync_each_microbatch": No("DeepSpeed reduces each microbatch from stage 2 on"),
    "parallel.wrap": No("DeepSpeed gathers module by module"),
    "parallel.wrap_elements": No("DeepSpeed gathers module by module"),
    "precision.param": No("follows the fp16 and bf16 blocks"),
    "precision.compute": No("follows the fp16 and bf16 blocks"),
    "precision.reduce": To("communication_data_type", _LONG.__getitem__),
    "precision.accumulate": To("data_types.grad_accum_dtype", _LONG.__getitem__),
    "precision.master": Only("fp32", "master weights are fp32", "see fp16.fp16_master_weights_and_grads"),
    "offload.params": To("zero_optimization.offload_param.device"),
}
_SECTIONS = {
    "model": "the program builds the model",
    "data": "the program loads the data",
    "train": "the program decides about it",
    "optim": "the program decides about it",
    "parallel": "the program or the launcher decides about it",
    "precision": "DeepSpeed has no such key",
    "memory": "the program decides about it (deepspeed.checkpointing)",
    "offload": "DeepSpeed has no such key",
    "checkpoint": "the program calls save_checkpoint and load_checkpoint",
    "monitor": "the program or a monitor block decides about it",
    "hardware": "DeepSpeed finds the accelerator itself",
    "engine": "DeepSpeed has one engine",
}
_SCALING = {
    "precision.growth_interval": "fp16.loss_scale_window",
    "precision.hysteresis": "fp16.hysteresis",
    "precision.min_scale": "fp16.min_loss_scale",
}


def to_deepspeed(values: Mapping[str, Any]) -> Translation:
    """Translate values of a run file (nested, whole or partial) into a DeepSpeed config.

    Keys that are not there stay absent, so that DeepSpeed's own defaults hold for them.
    """
    notes = Notes(dict(_flat(values, "")))
    _optimizer(notes)
    _schedule(notes)
    _precision(notes)
    _parallel(notes)
    _no_effect(notes)
    apply(notes, {path: entry for path, entry in _KEYS.items() if "beta" not in path}, _SECTIONS)
    return notes.result()


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _no_effect(notes: Notes) -> None:
    for path in ("offload.nvme_path", "optim.decay_steps", "train.rampup_start", "train.rampup_increment"):
        if notes.has(path) and notes.get(path) is None:
            notes.same(path, "not set")


def _optimizer(notes: Notes) -> None:
    kind = notes.get("optim.kind")
    beta1, beta2 = notes.get("optim.beta1"), notes.get("optim.beta2")
    if kind is not None:
        notes.put("optim.kind", "optimizer.type", {"adamw": "AdamW", "sgd": "SGD"}[kind])
    if notes.has("optim.lr"):
        notes.put("optim.lr", "optimizer.params.lr", notes.get("optim.lr"))
    if kind == "sgd":
        for path in ("optim.beta1", "optim.beta2", "optim.eps"):
            if notes.has(path):
                notes.same(path, "SGD does not read it")
    elif beta1 is not None and beta2 is not None:
        for path in ("optim.beta1", "optim.beta2"):
            notes.put(path, "optimizer.params.betas", [beta1, beta2])
    else:
        for path in ("optim.beta1", "optim.beta2"):
            if notes.has(path):
                notes.drop(path, "DeepSpeed takes both betas or none")


def _schedule(notes: Notes) -> None:
    kind = notes.get("optim.schedule")
    if kind is None:
        return
    names = {schedule: name for name, schedule in SCHEDULES.items()}
    low, peak = notes.get("optim.min_lr", 0.0), notes.get("optim.lr")
    if kind not in names or (kind == "linear" and low != 0) or peak is None:
        why = "no schedule of DeepSpeed does so" if kind not in names else "WarmupDecayLR ends at zero"
        notes.drop("optim.schedule", why if peak is not None else "needs optim.lr")
        return
    at = "scheduler.params."
    notes.put("optim.schedule", "scheduler.type", names[kind])
    notes.put("optim.schedule", f"{at}warmup_type", "linear")
    if notes.has("optim.warmup_steps"):
        notes.put("optim.warmup_steps", f"{at}warmup_num_steps", notes.get("optim.warmup_steps"))
    if kind == "cosine":
        notes.put("optim.schedule", f"{at}warmup_min_ratio", 0.0)
        if notes.has("optim.min_lr"):
            notes.put("optim.min_lr", f"{at}cos_min_ratio", low / peak, "a share of lr")
    else:
        notes.put("optim.schedule", f"{at}warmup_min_lr", 0.0)
        notes.put("optim.lr", f"{at}warmup_max_lr", peak)
        if notes.has("optim.min_lr"):
            notes.same("optim.min_lr", "where this schedule ends")
    if kind != "constant" and notes.has("train.steps"):
        notes.put("train.steps", f"{at}total_num_steps", notes.get("train.steps"))


def _precision(notes: Notes) -> None:
    policy = notes.get("precision.policy")
    if policy in ("fp16", "bf16"):
        notes.put("precision.policy", f"{policy}.enabled", True)
    elif policy is not None:
        notes.same("precision.policy", "DeepSpeed trains in fp32 unless fp16 or bf16 is enabled")
    scaling = [path for path in ("precision.loss_scale", *_SCALING) if notes.has(path)]
    scaling += [
        path for path in ("precision.initial_scale", "precision.loss_scale_convention") if notes.has(path)
    ]
    if policy != "fp16":
        for path in scaling:
            notes.drop(path, "DeepSpeed scales the loss of fp16 only")
        return
    dynamic = notes.get("precision.loss_scale", "dynamic") == "dynamic"
    initial = notes.get("precision.initial_scale")
    if notes.has("precision.loss_scale"):
        constant = {"dynamic": 0, "none": 1}.get(notes.get("precision.loss_scale"), initial)
        notes.put("precision.loss_scale", "fp16.loss_scale", constant)
    if dynamic and initial is not None:
        _initial_scale(notes, initial)
    for path, target in _SCALING.items():
        if notes.has(path) and dynamic:
            notes.put(path, target, whole(notes.get(path)))
    convention = "precision.loss_scale_convention"
    apply(notes, {convention: Only("deepspeed", "its own convention", "DeepSpeed doubles one step later")})
    for path in scaling:
        if notes.has(path):
            notes.same(path, "not read for a constant scale")


def _initial_scale(notes: Notes, scale: float) -> None:
    power = int(scale).bit_length() - 1
    if scale == 2.0**power:
        notes.put("precision.initial_scale", "fp16.initial_scale_power", power)
    else:
        notes.drop("precision.initial_scale", f"{show(scale)} is not a power of two")


def _parallel(notes: Notes) -> None:
    bucket = "parallel.bucket_mb"
    if notes.has(bucket):
        each = 4 if notes.get("precision.policy", "fp32") == "fp32" else 2
        elements = round(notes.get(bucket) * _MIB / each)
        notes.put(bucket, "zero_optimization.reduce_bucket_size", elements, f"elements of {each} bytes")
    replicas, shards = notes.get("parallel.dp_replicate", 1), notes.get("parallel.dp_shard")
    if notes.has("parallel.dp_replicate"):
        if replicas > 1 and shards is not None and notes.get("parallel.zero_stage") == 3:
            notes.put(
                "parallel.dp_replicate", "zero_optimization.mics_shard_size", shards, "MiCS: hybrid sharding"
            )
        elif replicas == 1:
            notes.same("parallel.dp_replicate", "all data-parallel workers share one copy")
    if notes.has("parallel.dp_shard"):
        notes.same("parallel.dp_shard", "follows from the number of processes")
    _offload(notes)


def _offload(notes: Notes) -> None:
    block = "zero_optimization.offload_optimizer"
    device = notes.get("offload.optimizer", "none")
    if notes.has("offload.optimizer") and device != "none":
        notes.put("offload.optimizer", f"{block}.device", device)
    elif notes.has("offload.optimizer"):
        notes.same("offload.optimizer", "nothing is offloaded")
    if notes.has("offload.fraction"):
        share, stage = notes.get("offload.fraction"), notes.get("parallel.zero_stage")
        if device == "none" or share == 1:
            notes.same("offload.fraction", "all of what is offloaded")
        elif stage != 3:
            notes.drop("offload.fraction", "DeepSpeed offloads a part only at stage 3")
        else:
            notes.put("offload.fraction", f"{block}.ratio", share)
    if notes.has("offload.nvme_path") and notes.get("offload.nvme_path") is not None:
        notes.put("offload.nvme_path", f"{block}.nvme_path", notes.get("offload.nvme_path"))
    if notes.get("offload.params") == "none":
        notes.same("offload.params", "nothing is offloaded")

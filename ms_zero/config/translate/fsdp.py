"""PyTorch FSDP options as a run file: arguments of both versions, accelerate's YAML, fsdp_config.

A file with options is a mapping with the names of the constructor's arguments
(`sharding_strategy: FULL_SHARD`, `mixed_precision: {param_dtype: bfloat16}`, `reshard_after_forward: true`).
In accelerate's file they lie below `fsdp_config`, with or without the prefix `fsdp_`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ms_zero.config.findings import show
from ms_zero.config.translate.result import RunNotes, Source, Translation
from ms_zero.config.translate.table import Entry, No, Only, To, apply, dtype, finish_unknown, integer, put
from ms_zero.errors import UserError

TOOL: Final = "PyTorch FSDP or accelerate"

_STRATEGIES: Mapping[str, tuple[int, bool | None, bool]] = {  # stage, reshard after forward, hybrid
    "FULL_SHARD": (3, True, False),
    "SHARD_GRAD_OP": (3, False, False),
    "NO_SHARD": (0, None, False),
    "HYBRID_SHARD": (3, True, True),
    "HYBRID_SHARD_ZERO2": (3, False, True),
}
_NUMBERED = {str(number): name for number, name in enumerate(_STRATEGIES, start=1)}
_LAUNCH = "how workers are started is told to 'ms-zero launch'"
_BUILT = "every rank builds only its shards, from one seed"
_INIT = "initial values depend on the seed alone, so ranks need not send them"
_WHOLE = "checkpoints hold whole logical tensors and load on any layout"
_CASTS = "inputs are token ids: nothing to cast"
_WITHIN = "accelerate warns and goes on without it when fsdp_version is 2"
_ONLY_1 = (
    "backward_prefetch",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
)

_OPTIONS: Mapping[str, Entry] = {
    "forward_prefetch": No("units are gathered ahead in their order in either pass; see parallel.prefetch"),
    "use_orig_params": Only(
        True, "parameters keep their names and shapes", "parameters always keep their names"
    ),
    "sync_module_states": No(_INIT),
    "limit_all_gathers": Only(
        True,
        "at most parallel.prefetch units are gathered ahead",
        "gathering ahead is bounded by parallel.prefetch",
    ),
    "state_dict_type": No(_WHOLE),
    "cpu_ram_efficient_loading": No(_BUILT),
    "param_init_fn": No(_BUILT),
    "device_id": No("each worker has one device"),
    "process_group": No("groups follow from parallel"),
    "ignored_modules": No("every parameter takes part"),
    "ignored_states": No("every parameter takes part"),
    "ignored_params": No("every parameter takes part"),
    "shard_placement_fn": No("shards are equal parts of a unit's flat buffer"),
    "mixed_precision.buffer_dtype": No("buffers keep their dtype"),
    "mixed_precision.keep_low_precision_grads": Only(
        False, "gradients are added up as precision.accumulate says", "see precision.accumulate"
    ),
    "mixed_precision.cast_forward_inputs": No(_CASTS),
    "mixed_precision.cast_root_forward_inputs": No(_CASTS),
    "mp_policy.output_dtype": No("logits and loss are fp32"),
    "mp_policy.cast_forward_inputs": No(_CASTS),
    "offload_policy.pin_memory": No("host buffers are pinned where the device needs it"),
    "xla": Only(False, "no XLA", "XLA is not offered"),
    "xla_fsdp_v2": Only(False, "no XLA", "XLA is not offered"),
    "xla_fsdp_settings": No("XLA is not offered"),
    "xla_fsdp_grad_ckpt": Only(False, "no XLA", "XLA is not offered"),
}
_LAUNCHER: Mapping[str, Entry] = {
    "compute_environment": No(_LAUNCH),
    "debug": To("train.debug_collectives", bool, "both check collectives before they are issued"),
    "distributed_type": Only("FSDP", "sharding is chosen by parallel", "the file is not for FSDP"),
    "downcast_bf16": No("belongs to TPUs"),
    "enable_cpu_affinity": No("'ms-zero launch' binds workers to their share of the cores"),
    "gradient_accumulation_steps": To("train.accumulation_steps", integer),
    "gradient_clipping": To("optim.clip_norm", float),
    "machine_rank": No(_LAUNCH),
    "main_process_ip": No(_LAUNCH),
    "main_process_port": No(_LAUNCH),
    "main_training_function": No("the trainer is part of the package"),
    "num_machines": No(_LAUNCH),
    "num_processes": No("the number of workers: 'ms-zero launch --workers'"),
    "rdzv_backend": No(_LAUNCH),
    "same_network": No(_LAUNCH),
    "use_cpu": To("hardware.target", lambda on: "CPU" if _truth(on) else "GPU"),
    "gpu_ids": No(_LAUNCH),
    "command_file": No(_LAUNCH),
    "commands": No(_LAUNCH),
    "dynamo_backend": No("torch.compile"),
    "fp16": To("precision.policy", lambda on: "fp16" if _truth(on) else "fp32"),
    "bf16": To("precision.policy", lambda on: "bf16" if _truth(on) else "fp32"),
    "parallelism_config.parallelism_config_dp_replicate_size": To("parallel.dp_replicate", integer),
    "parallelism_config.parallelism_config_dp_shard_size": To("parallel.dp_shard", integer),
    "parallelism_config.parallelism_config_tp_size": To("parallel.tp", integer),
    "parallelism_config.parallelism_config_cp_size": To("parallel.cp", integer),
}
_OTHER_SECTIONS: Mapping[str, str] = {
    "dynamo_config": "torch.compile",
    "deepspeed_config": "translate that file with 'ms-zero translate deepspeed'",
    "megatron_lm_config": "translate its arguments with 'ms-zero translate megatron'",
    "parallelism_config": "see parallel",
    "fp8_config": "fp8 is not in this version",
    "tpu": _LAUNCH,
}
_TAKEN = (
    "sharding_strategy",
    "reshard_after_forward",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "backward_prefetch",
    "backward_prefetch_policy",
    "offload_params",
    "cpu_offload",
    "cpu_offload.offload_params",
    "offload_policy",
    "activation_checkpointing",
    "mixed_precision",
    "mixed_precision_policy",
    "mixed_precision.param_dtype",
    "mixed_precision.reduce_dtype",
    "mp_policy.param_dtype",
    "mp_policy.reduce_dtype",
    "version",
    "mesh",
    "device_mesh",
    "fsdp",
)


class _Options(RunNotes):
    """The source under short names: `fsdp_config.fsdp_offload_params` is `offload_params`."""

    def __init__(self, source: Source) -> None:
        self.names: dict[str, str] = {}
        leaves: dict[str, Any] = {}
        for path, value in source.leaves.items():
            name = _short(path)
            if name in leaves:
                raise UserError(
                    f"{source.places[path]}: {path}: the same option as {self.names[name]}; keep one"
                )
            self.names[name], leaves[name] = path, _member(value)
        super().__init__(leaves)

    def result(self) -> Translation:
        """Tell every key by the name that the file uses."""
        self.leaves = {self.names.get(name, name): value for name, value in self.leaves.items()}
        self._notes = [replace(note, source=self.names.get(note.source, note.source)) for note in self._notes]
        self._from = {target: self.names.get(name, name) for target, name in self._from.items()}
        return super().result()


def translate_fsdp(source: Source) -> Translation:
    """Translate FSDP options. Raises UserError where one option is written twice."""
    notes = _Options(source)
    version = notes.get("version", 2 if "reshard_after_forward" in notes.leaves else 1)
    if notes.has("version"):
        notes.same("version", "both versions shard alike; the options differ")
    _flags(notes)
    _ignored(notes, version)
    _sharding(notes, version, source.workers)
    _wrap(notes)
    _precision(notes)
    _offload(notes)
    _prefetch(notes)
    if notes.has("activation_checkpointing"):
        source, kinds = "activation_checkpointing", {True: "full", False: "none"}
        put(notes, source, "memory.recompute", lambda on: kinds[_truth(on)], "per wrapped block")
    apply(notes, {**_OPTIONS, **_LAUNCHER}, _OTHER_SECTIONS)
    for name in [name for name in notes.left() if name.startswith("tpu_")]:
        notes.drop(name, _LAUNCH)
    finish_unknown(notes, [*_TAKEN, *_OPTIONS, *_LAUNCHER, *_OTHER_SECTIONS], TOOL)
    return notes.result()


def _short(path: str) -> str:
    name = path.removeprefix("fsdp_config.").removeprefix("fully_shard.")
    return name if name == "fsdp" else name.removeprefix("fsdp_")


def _member(value: Any) -> Any:
    """Return `FULL_SHARD` for `ShardingStrategy.FULL_SHARD`."""
    enums = ("ShardingStrategy.", "BackwardPrefetch.", "StateDictType.")
    return value.partition(".")[2] if isinstance(value, str) and value.startswith(enums) else value


def _truth(value: Any) -> bool:
    """Return a truth value, also from the texts that accelerate takes for one; raises ValueError."""
    words = {
        "true": True,
        "yes": True,
        "1": True,
        "on": True,
        "false": False,
        "no": False,
        "0": False,
        "off": False,
    }
    found = value if isinstance(value, bool) else words.get(str(value).lower())
    if found is None:
        raise ValueError(f"{show(value)} is not true or false")
    return found


def _flags(notes: _Options) -> None:
    """Hugging Face's `fsdp: "full_shard auto_wrap offload"`."""
    words = notes.get("fsdp")
    if not notes.has("fsdp"):
        return
    for word in words if isinstance(words, list) else str(words).split():
        if str(word).upper() in _STRATEGIES:
            _strategy(notes, "fsdp", str(word).upper())
        elif word == "offload":
            _offload_weights(notes, "fsdp", True)
        elif word == "auto_wrap":
            notes.put("fsdp", "parallel.wrap", "block", "the blocks of the model")
        else:
            notes.drop("fsdp", f"{show(word)} is not an option of FSDP")
    if notes.has("fsdp"):
        notes.same("fsdp", "no sharding was asked for")


def _ignored(notes: _Options, version: int) -> None:
    for name in _ONLY_1:
        if notes.has(name) and version == 2:
            notes.ignored(name, _WITHIN)
    if notes.has("sharding_strategy") and version == 2 and "reshard_after_forward" in notes.leaves:
        notes.ignored("sharding_strategy", "FSDP2 reads reshard_after_forward instead")
    policy = str(notes.get("auto_wrap_policy", "")).upper()
    if notes.has("min_num_params") and policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        notes.ignored("min_num_params", f"only read for SIZE_BASED_WRAP, but the policy is {policy}")
    if notes.has("transformer_layer_cls_to_wrap") and policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
        notes.ignored("transformer_layer_cls_to_wrap", f"only read for TRANSFORMER_BASED_WRAP, not {policy}")


def _sharding(notes: _Options, version: int, workers: int | None) -> None:
    if notes.has("sharding_strategy"):
        given = notes.get("sharding_strategy")
        name = _NUMBERED.get(str(given)) or str(given).upper()
        _strategy(notes, "sharding_strategy", name.lstrip("_"))
    if notes.has("reshard_after_forward"):
        _reshard(notes, version)
    told = {"sharding_strategy", "reshard_after_forward", "fsdp"} & notes.leaves.keys()
    if not told and notes.get("distributed_type", "FSDP") == "FSDP":
        notes.default("sharding_strategy", "parallel.zero_stage", 3, "not given: FULL_SHARD")
    _mesh(notes)
    strategy = str(notes.get("sharding_strategy", "")) + str(notes.get("fsdp", ""))
    if "HYBRID" in strategy.upper() and notes.value("parallel.dp_shard") is None:
        _nodes(notes, workers)


def _strategy(notes: _Options, source: str, name: str) -> None:
    if name not in _STRATEGIES:
        notes.drop(source, f"{show(name)} is not a sharding strategy")
        return
    stage, reshard, _ = _STRATEGIES[name]
    if reshard is False:
        if notes.put(
            source, "parallel.reshard_after_forward", False, "weights are sharded, but kept until backward"
        ):
            notes.put(source, "parallel.zero_stage", stage)
        else:
            remark = "sharded weights that are kept until backward are nearest to stage 2 in this version"
            notes.put(source, "parallel.zero_stage", 2, remark)
        return
    notes.put(source, "parallel.zero_stage", stage)
    if reshard:
        notes.default(
            source, "parallel.reshard_after_forward", True, "weights are released after their forward"
        )


def _reshard(notes: _Options, version: int) -> None:
    given = notes.get("reshard_after_forward")
    if isinstance(given, str) and given.upper() in _STRATEGIES:  # FSDP1 in accelerate: a strategy
        _strategy(notes, "reshard_after_forward", given.upper())
    elif isinstance(given, int) and not isinstance(given, bool):
        notes.drop(
            "reshard_after_forward", "resharding to a part of the ranks is not offered; use true or false"
        )
        notes.default("reshard_after_forward", "parallel.zero_stage", 3, "fully_shard shards weights")
    elif version == 1 and "sharding_strategy" in notes.leaves:
        notes.ignored("reshard_after_forward", "FSDP1 reads sharding_strategy instead")
    elif isinstance(given, bool):
        _strategy(notes, "reshard_after_forward", "FULL_SHARD" if given else "SHARD_GRAD_OP")
    else:
        notes.drop("reshard_after_forward", f"{show(given)} is not true or false")


def _mesh(notes: _Options) -> None:
    for source in ("mesh", "device_mesh"):
        sizes = notes.get(source)
        if not notes.has(source):
            continue
        if isinstance(sizes, list) and len(sizes) == 2:
            notes.put(source, "parallel.dp_replicate", sizes[0])
            notes.put(source, "parallel.dp_shard", sizes[1])
        elif isinstance(sizes, list) and len(sizes) == 1:
            notes.put(source, "parallel.dp_shard", sizes[0])
        else:
            notes.drop(source, "expected [dp_shard] or [dp_replicate, dp_shard]")


def _nodes(notes: _Options, workers: int | None) -> None:
    """Hybrid sharding: shards within a machine, replicas across machines."""
    machines, total = notes.get("num_machines"), notes.get("num_processes", workers)
    if isinstance(machines, int) and isinstance(total, int) and machines > 0 and total % machines == 0:
        notes.default("num_machines", "parallel.dp_replicate", machines, "hybrid: one copy a machine")
        notes.default(
            "num_processes", "parallel.dp_shard", total // machines, "hybrid: shards within a machine"
        )
    else:
        source = "sharding_strategy" if "sharding_strategy" in notes.leaves else "fsdp"
        reason = "hybrid: set parallel.dp_shard to the devices of a machine and dp_replicate to the machines"
        notes.note(source, "untranslatable", reason, "parallel.dp_replicate")


def _wrap(notes: _Options) -> None:
    policy = str(notes.get("auto_wrap_policy", "")).upper()
    if notes.has("auto_wrap_policy"):
        if policy in ("TRANSFORMER_BASED_WRAP", "TRANSFORMER_AUTO_WRAP_POLICY", "MODULEWRAPPOLICY"):
            notes.put("auto_wrap_policy", "parallel.wrap", "block")
        elif policy in ("SIZE_BASED_WRAP", "SIZE_BASED_AUTO_WRAP_POLICY"):
            notes.put("auto_wrap_policy", "parallel.wrap", "size")
        else:
            notes.drop(
                "auto_wrap_policy", "units are blocks, or consecutive weights of a size; see parallel.wrap"
            )
    if notes.has("transformer_layer_cls_to_wrap"):
        notes.same("transformer_layer_cls_to_wrap", "the blocks of the model are known")
    if notes.has("min_num_params"):
        size = notes.get("min_num_params")
        if size in (0, "0"):
            notes.same("min_num_params", "no size, so blocks")
        else:
            put(notes, "min_num_params", "parallel.wrap_elements", integer)


def _precision(notes: _Options) -> None:
    for source in ("mixed_precision", "mixed_precision_policy"):
        given = str(notes.get(source, "")).lower()
        if not notes.has(source):
            continue
        if given in ("no", "none", "false", "fp32"):
            notes.put(source, "precision.policy", "fp32")
        elif given in ("fp16", "bf16"):
            _half(notes, source, given)
            reason = f"accelerate reduces gradients in {given}"
            notes.default(source, "precision.reduce", given, reason)
        else:
            notes.drop(source, f"{show(notes.get(source))} is not offered; see precision.policy")
    for block in ("mixed_precision", "mp_policy"):
        _policy_block(notes, block)


def _policy_block(notes: _Options, block: str) -> None:
    param, reduce = f"{block}.param_dtype", f"{block}.reduce_dtype"
    try:
        name = dtype(notes.get(param)) if notes.get(param) is not None else "fp32"
    except ValueError as error:
        notes.drop(param, str(error))
        return
    if notes.has(param):
        if name == "fp32":
            notes.put(param, "precision.policy", "fp32")
        else:
            _half(notes, param, name)
            if notes.get(reduce) is None:
                notes.default(reduce, "precision.reduce", name, "not given: FSDP reduces in param_dtype")
    if notes.has(reduce):
        if notes.get(reduce) is None:
            notes.same(reduce, "as param_dtype")
        else:
            put(notes, reduce, "precision.reduce", dtype)


def _half(notes: _Options, source: str, name: str) -> None:
    remark = "16-bit copies are gathered and computed with; FSDP's fp32 shards are the master weights here"
    if not notes.put(source, "precision.policy", name, remark) or name == "bf16":
        return
    reason = "the default of torch's gradient scaler, which the program creates"
    scaler = {"loss_scale": "dynamic", "loss_scale_convention": "torch", "growth_interval": 2000}
    for key, value in scaler.items():
        notes.default(source, f"precision.{key}", value, reason)


def _offload(notes: _Options) -> None:
    for source in ("offload_params", "cpu_offload", "cpu_offload.offload_params"):
        if not notes.has(source):
            continue
        try:
            on = _truth(notes.get(source) or False)
        except ValueError as error:
            notes.drop(source, str(error))
            continue
        _offload_weights(notes, source, on)
    if notes.has("offload_policy"):
        on = str(notes.get("offload_policy")).startswith("CPUOffloadPolicy")
        _offload_weights(notes, "offload_policy", on)


def _offload_weights(notes: _Options, source: str, on: bool) -> None:
    remark = "weights and gradients wait in host memory" if on else ""
    notes.put(source, "offload.params", "cpu" if on else "none", remark)
    if on:
        notes.default(source, "offload.optimizer", "cpu", "FSDP updates offloaded weights on the host")


def _prefetch(notes: _Options) -> None:
    for source in ("backward_prefetch", "backward_prefetch_policy"):
        given = str(notes.get(source)).upper()
        if not notes.has(source):
            continue
        if given == "BACKWARD_PRE":
            notes.put(source, "parallel.prefetch", 1, "the next unit is gathered during the current one")
        elif given in ("NO_PREFETCH", "NONE"):
            notes.put(source, "parallel.prefetch", 0)
        else:
            notes.drop(
                source,
                "gathering after the unit's gradients is not offered; parallel.prefetch keeps its default",
            )

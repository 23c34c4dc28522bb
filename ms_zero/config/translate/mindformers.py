"""MindFormers YAML as a run file: the graph-mode trainer's file, and the PyNative trainer's (2.0).

They differ in their top level: the one has `parallel_config` and `runner_config`, the other `parallelism` and
`training`.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from ms_zero.config.findings import show
from ms_zero.config.translate import mindformers_keys as keys
from ms_zero.config.translate.result import RunNotes, Source, Translation
from ms_zero.config.translate.table import apply, dtype, finish_unknown, integer, number, put, put_context

TOOL: Final = "MindFormers"
SCHEDULES: Final = {
    "ConstantWarmUpLR": "constant",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
    "WarmUpStableDecayLR": "wsd",
    "CosineAnnealingLR": "cosine",
}
_ADAMW: Final = (
    "adamw",
    "adamweightdecay",
    "fp32stateadamweightdecay",
    "fusedcastadamweightdecay",
    "pmaadamw",
)


def translate_mindformers(source: Source) -> Translation:
    """Translate a MindFormers file of either trainer."""
    notes = RunNotes(source.leaves)
    sections = {name.partition(".")[0] for name in source.leaves}
    pynative = (
        bool(sections & {"parallelism", "training", "lr_scheduler"}) and "parallel_config" not in sections
    )
    if pynative:
        _training(notes)
        _parallelism(notes, source.workers)
        put_context(notes, keys.PYNATIVE_METHOD, "parallelism.context_parallel", keys.PYNATIVE_METHODS)
        _recompute_pynative(notes)
    else:
        _runner(notes)
        _parallel_config(notes)
        put_context(notes, keys.GRAPH_METHOD, "parallel_config.context_parallel", keys.GRAPH_METHODS)
        _recompute_graph(notes)
        _wrapper(notes)
    _repeated(notes)
    schedule = "lr_scheduler" if pynative else "lr_schedule"
    _schedule(notes, schedule)
    _optimizer(notes, schedule, pynative)
    _model(notes, "model" if pynative else "model.model_config")
    _data(notes, "train_dataset.dataloader" if pynative else "train_dataset.data_loader")
    _callbacks(notes)
    table = {**keys.SHARED, **(keys.PYNATIVE if pynative else keys.GRAPH)}
    apply(notes, table, {**keys.SECTIONS, **(keys.PYNATIVE_SECTIONS if pynative else keys.GRAPH_SECTIONS)})
    known = [*table, *(keys.PYNATIVE_KNOWN if pynative else keys.GRAPH_KNOWN), *keys.SECTIONS]
    finish_unknown(notes, known, TOOL)
    return notes.result()


def _repeated(notes: RunNotes) -> None:
    """`dataset_config: *train_dataset` repeats that section by an alias."""
    prefix = "train_dataset_task.dataset_config."
    repeated = [name for name in notes.left() if name.startswith(prefix)]
    for name in repeated:
        twin = name.replace(prefix, "train_dataset.", 1)
        if notes.leaves.get(twin) == notes.get(name):
            notes.forget(name)
    if repeated:
        notes.same("train_dataset_task.dataset_config", "repeats train_dataset")


def _training(notes: RunNotes) -> None:
    if notes.has("training.steps"):
        put(notes, "training.steps", "train.steps", integer)
    else:
        notes.default("training.steps", "train.steps", 1000, "not given: 1000 in MindFormers")
    for name, target in (
        ("local_batch_size", "micro_batch_size"),
        ("global_batch_size", "global_batch_size"),
    ):
        source = f"training.{name}"
        remark = "MindFormers rounds the accumulation steps down; here the product has to be exact"
        if notes.has(source):
            put(notes, source, f"train.{target}", integer, remark if name.startswith("global") else "")
        else:
            notes.default(source, f"train.{target}", 1, "not given: 1 in MindFormers")
    norm = "training.max_norm"
    if notes.has(norm):
        if isinstance(notes.get(norm), int | float) and notes.get(norm) <= 0:
            reason = (
                "MindFormers would scale every gradient by it (0 stops training); 0 turns clipping off here"
            )
            notes.put(norm, "optim.clip_norm", 0.0, reason)
        else:
            put(notes, norm, "optim.clip_norm", number)


def _parallelism(notes: RunNotes, workers: int | None) -> None:
    at = "parallelism."
    shard = notes.get(f"{at}data_parallel_shard", -1)
    notes.default(f"{at}data_parallel_shard", "parallel.zero_stage", 3, "weights are sharded (FSDP)")
    if notes.has(f"{at}data_parallel_shard"):
        if not isinstance(shard, int) or shard < 1:
            notes.same(f"{at}data_parallel_shard", "dp_shard takes the workers that the other degrees leave")
        else:
            remark = "with fewer shards than data-parallel workers, set parallel.dp_replicate"
            notes.put(f"{at}data_parallel_shard", "parallel.dp_shard", shard, remark)
            _replicas(notes, shard, workers)
    policy, stages = f"{at}reshard_after_forward_policy", notes.get(f"{at}pipeline_parallel", 1)
    given = notes.get(policy, "default")
    reshard = {"always": True, "never": False, "default": stages == 1}.get(str(given))
    if notes.has(policy):
        if reshard is None:
            notes.drop(policy, f"{show(given)} is not always, never or default")
        else:
            remark = "default means never with a pipeline, always without" if given == "default" else ""
            notes.put(policy, "parallel.reshard_after_forward", reshard, remark)
    else:
        notes.default(policy, "parallel.reshard_after_forward", reshard, "not given: never with a pipeline")
    if notes.has(f"{at}cpu_offload"):
        on = notes.get(f"{at}cpu_offload") is True
        notes.put(f"{at}cpu_offload", "offload.params", "cpu" if on else "none")
    degree = notes.get(f"{at}tensor_parallel", 1)
    if isinstance(degree, int) and degree > 1:
        reason = "MindFormers turns it on with tensor parallelism"
        notes.default(f"{at}tensor_parallel", "parallel.sequence_parallel", True, reason)
    if notes.has(f"{at}sequence_parallel"):
        notes.ignored(
            f"{at}sequence_parallel", "MindFormers turns it on with tensor parallelism, and only then"
        )


def _replicas(notes: RunNotes, shard: int, workers: int | None) -> None:
    degrees = [notes.get(f"parallelism.{name}_parallel", 1) for name in ("pipeline", "tensor", "context")]
    if workers is None or not all(isinstance(degree, int) and degree > 0 for degree in degrees):
        return
    replicas, rest = divmod(workers, shard * degrees[0] * degrees[1] * degrees[2])
    if rest == 0 and replicas > 0:
        reason = f"{workers} workers / the other degrees"
        notes.default("parallelism.data_parallel_shard", "parallel.dp_replicate", replicas, reason)


def _recompute_pynative(notes: RunNotes) -> None:
    mode, layers = notes.get("recompute.mode", "None"), "recompute.full_recompute_layer"
    total = notes.get("model.num_hidden_layers")
    if notes.has("recompute.mode"):
        if str(mode) == "None":
            notes.put("recompute.mode", "memory.recompute", "none")
        elif mode == "full" and notes.get(layers) not in (
            [f"0-{total - 1}" if isinstance(total, int) else ""],
            None,
        ):
            notes.drop(
                "recompute.mode", "only some blocks recompute; see memory.recompute and memory.budget_gb"
            )
        else:
            notes.put("recompute.mode", "memory.recompute", "selective" if mode == "select" else mode)
    for name, mode_of in (("full_recompute_layer", "full"), ("select_module", "select")):
        for source in [item for item in notes.left() if item.startswith(f"recompute.{name}")]:
            if mode != mode_of:
                notes.ignored(source, f"only read when recompute.mode is {mode_of}")
            else:
                notes.drop(source, "every block is treated alike; see memory.recompute")


def _runner(notes: RunNotes) -> None:
    """global = batch_size x data_parallel x (micro_batch_num or gradient_accumulation_steps) x interleave."""
    stages = notes.get("parallel_config.pipeline_stage", 1)
    if notes.has("runner_config.batch_size"):
        put(notes, "runner_config.batch_size", "train.micro_batch_size", integer)
    interleave = notes.get("micro_batch_interleave_num", 1)
    pieces, steps = "parallel_config.micro_batch_num", "runner_config.gradient_accumulation_steps"
    used, unused, why = (pieces, steps, "with") if stages != 1 else (steps, pieces, "without")
    if notes.has(unused):
        notes.ignored(unused, f"not read {why} a pipeline: the accumulation is {used}")
    factor = notes.get(used, 1)
    if isinstance(factor, int) and isinstance(interleave, int):
        remark = f"x micro_batch_interleave_num {interleave}" if interleave != 1 else ""
        if notes.has(used):
            notes.put(used, "train.accumulation_steps", factor * interleave, remark)
        elif "runner_config.batch_size" in notes.leaves:
            reason = f"not given: {factor}{f' {remark}' if remark else ''}"
            notes.default(used, "train.accumulation_steps", factor * interleave, reason)
    if notes.has("micro_batch_interleave_num"):
        if interleave == 1:
            notes.same("micro_batch_interleave_num", "micro-batches are not split")
        else:
            notes.drop(
                "micro_batch_interleave_num", "counted in train.accumulation_steps; pieces do not overlap"
            )


def _parallel_config(notes: RunNotes) -> None:
    at = "parallel_config."
    degree, sharded = (
        notes.get(f"{at}data_parallel", 1),
        notes.get("parallel.enable_parallel_optimizer") is True,
    )
    switch, size = "parallel.enable_parallel_optimizer", f"{at}optimizer_weight_shard_size"
    part = notes.get(size, -1)
    groups = isinstance(part, int) and part > 0 and isinstance(degree, int) and degree % part == 0
    shard = part if sharded and groups else degree
    if notes.has(f"{at}data_parallel"):
        notes.put(f"{at}data_parallel", "parallel.dp_shard", shard)
        if shard != degree:
            notes.default(size, "parallel.dp_replicate", degree // shard, "copies of the sharded groups")
    if notes.has(size):
        if sharded:
            notes.same(size, "told by parallel.dp_shard")
        else:
            notes.ignored(size, f"only read when {switch} is true")
    if notes.has(switch):
        _parallel_optimizer(notes, switch, sharded)
    for name in [item for item in notes.left() if item.startswith("parallel.parallel_optimizer_config.")]:
        if not sharded:
            notes.ignored(name, f"only read when {switch} is true")


def _parallel_optimizer(notes: RunNotes, switch: str, sharded: bool) -> None:
    if not sharded:
        notes.put(switch, "parallel.zero_stage", 0)
        return
    again = notes.get("recompute_config.parallel_optimizer_comm_recompute") is True
    remark = "weights are sharded too; gradients are whole in MindFormers until they are reduced"
    notes.put(switch, "parallel.zero_stage", 3, remark)
    source = "recompute_config.parallel_optimizer_comm_recompute"
    if notes.has(source):
        notes.put(
            source, "parallel.reshard_after_forward", again, "whether weights are gathered again for backward"
        )
    else:
        reason = "not given: gathered weights are kept until backward"
        notes.default(source, "parallel.reshard_after_forward", False, reason)


def _recompute_graph(notes: RunNotes) -> None:
    full, some = "recompute_config.recompute", "recompute_config.select_recompute"
    selective = notes.get(some) not in (False, None)
    if notes.has(full):
        given = notes.get(full)
        if given is True:
            notes.put(full, "memory.recompute", "full")
        elif given in (False, 0):
            notes.put(full, "memory.recompute", "none") if not selective else notes.same(
                full, f"told by {some}"
            )
        else:
            notes.drop(
                full, "numbers of blocks per stage; every block is treated alike, see memory.budget_gb"
            )
    for source in [item for item in notes.left() if item == some or item.startswith(f"{some}.")]:
        if notes.get(source) is False:
            notes.same(source, f"told by {full}")
        elif notes.get(full) is True:
            notes.ignored(source, f"{full} is true, so whole blocks recompute")
        elif notes.get(source) is True and source == some:
            notes.put(source, "memory.recompute", "selective")
        else:
            notes.drop(source, "what selective recompute leaves out is fixed: the attention core")


def _wrapper(notes: RunNotes) -> None:
    scale, clip = "runner_wrapper.scale_sense", "runner_wrapper.use_clip_grad"
    if notes.has(scale):
        value = notes.get(scale)
        if value in (1, 1.0):
            notes.same(scale, "no loss scale")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            notes.put(scale, "precision.loss_scale", "static", "a constant scale")
            notes.default(scale, "precision.initial_scale", float(value), "the constant scale")
        else:
            notes.drop(scale, f"{show(value)} is not a number or a scaler")
    _scaler(notes, scale)
    norm = "runner_wrapper.max_grad_norm"
    if notes.has(clip) and notes.get(clip) is True:
        if notes.has(norm):
            notes.same(clip, "a limit above 0 clips")
            put(notes, norm, "optim.clip_norm", number)
        else:
            notes.put(clip, "optim.clip_norm", 1.0, "1.0 in MindFormers by default")
    elif notes.has(clip) and notes.get(clip) is False:
        notes.put(clip, "optim.clip_norm", 0.0, "0 turns clipping off")
        if notes.has(norm):
            notes.ignored(norm, f"only read when {clip} is true")


def _scaler(notes: RunNotes, scale: str) -> None:
    kind = notes.get(f"{scale}.type")
    if kind is None:
        return
    dynamic = kind in ("DynamicLossScaleUpdateCell", "AdaptiveLossScaleUpdateCell")
    notes.put(f"{scale}.type", "precision.loss_scale", "dynamic" if dynamic else "static")
    if notes.has(f"{scale}.loss_scale_value"):
        put(notes, f"{scale}.loss_scale_value", "precision.initial_scale", number)
    if notes.has(f"{scale}.scale_window"):
        put(notes, f"{scale}.scale_window", "precision.growth_interval", integer)
    if dynamic:
        notes.default(f"{scale}.type", "precision.loss_scale_convention", "torch", "halves on every overflow")
    if notes.has(f"{scale}.scale_factor"):
        if notes.get(f"{scale}.scale_factor") == 2:
            notes.same(f"{scale}.scale_factor", "the scale doubles and halves")
        else:
            notes.drop(f"{scale}.scale_factor", "the scale doubles and halves")


def _schedule(notes: RunNotes, section: str) -> None:
    if not notes.has(f"{section}.type"):
        return
    kind = str(notes.get(f"{section}.type"))
    if kind not in SCHEDULES:
        for source in [item for item in notes.left() if item.startswith(f"{section}.")]:
            notes.drop(source, f"{show(kind)} is not offered; see optim.schedule")
        return
    notes.put(f"{section}.type", "optim.schedule", SCHEDULES[kind])
    for name in ("learning_rate", "base_lr"):
        if notes.has(f"{section}.{name}"):
            put(notes, f"{section}.{name}", "optim.lr", number)
    for name in ("lr_end", "eta_min"):
        if notes.has(f"{section}.{name}"):
            put(notes, f"{section}.{name}", "optim.min_lr", number)
    _total(notes, section)
    _warmup(notes, section, kind)
    _tail(notes, section)


def _total(notes: RunNotes, section: str) -> None:
    source = f"{section}.total_steps"
    if not notes.has(source):
        return
    if notes.get(source) == -1:
        notes.drop(source, "epochs x samples / global batch: set train.steps")
    elif notes.value("train.steps") is not None and notes.get(source) != notes.value("train.steps"):
        notes.drop(source, "the decay here ends with the run, at train.steps")
    else:
        put(notes, source, "train.steps", integer)


def _warmup(notes: RunNotes, section: str, kind: str) -> None:
    ratio, steps, total = f"{section}.warmup_ratio", f"{section}.warmup_steps", notes.value("train.steps")
    share = notes.get(ratio)
    if notes.has(steps) and share is not None:
        notes.ignored(steps, "warmup_ratio is given and goes first")
    elif notes.has(steps):
        put(notes, steps, "optim.warmup_steps", integer)
    if notes.has(ratio):
        if share is None:
            notes.same(ratio, "not set")
        elif total is None and share != 0:
            notes.drop(ratio, "a share of steps that the file does not tell: set optim.warmup_steps")
        else:
            put(
                notes,
                ratio,
                "optim.warmup_steps",
                lambda value: int(number(value) * (total or 0)),
                f"of {total} steps",
            )
    if ratio not in notes.leaves and steps not in notes.leaves:
        notes.default(steps, "optim.warmup_steps", 0, "not given: no warm-up")
    first = f"{section}.warmup_lr_init"
    if notes.has(first):
        if notes.get(first) in (0, 0.0):
            notes.same(first, "the warm-up starts at zero")
        else:
            notes.drop(first, "the warm-up here starts at zero")


def _tail(notes: RunNotes, section: str) -> None:
    """What is left of a schedule: the start of wsd's decay, cycles."""
    total = notes.value("train.steps")
    start = notes.get(f"{section}.decay_start_steps")
    share = notes.get(f"{section}.decay_start_ratio")
    for name, begin in (("decay_start_steps", start), ("decay_start_ratio", share)):
        source = f"{section}.{name}"
        if not notes.has(source):
            continue
        finite = isinstance(begin, int | float) and not isinstance(begin, bool) and math.isfinite(begin)
        if not finite or not isinstance(total, int):
            notes.drop(source, "needs train.steps: set optim.decay_steps to the steps from there to the end")
        else:
            first = begin if name == "decay_start_steps" else int(begin * total)
            notes.put(source, "optim.decay_steps", total - first, f"from step {first} to {total}")
    cycles = f"{section}.num_cycles"
    if notes.has(cycles):
        if notes.get(cycles) == 0.5:
            notes.same(cycles, "half a cosine")
        else:
            notes.drop(cycles, "the cosine here falls once")
    for name in ("decay_steps", "decay_ratio", "t_max", "warmup_epochs", "power"):
        if notes.has(f"{section}.{name}"):
            notes.drop(f"{section}.{name}", "the decay here ends with the run, at train.steps")


def _optimizer(notes: RunNotes, schedule: str, pynative: bool) -> None:
    kind = notes.get("optimizer.type")
    if notes.has("optimizer.type"):
        if str(kind).lower() in _ADAMW:
            notes.put("optimizer.type", "optim.kind", "adamw")
        else:
            for source in [item for item in notes.left() if item.startswith("optimizer.")]:
                notes.drop(source, f"{show(kind)} is not offered; optim.kind is adamw or sgd")
            return
    betas = notes.get("optimizer.betas")
    if notes.has("optimizer.betas"):
        if isinstance(betas, list) and len(betas) == 2:
            notes.put("optimizer.betas", "optim.beta1", betas[0])
            notes.put("optimizer.betas", "optim.beta2", betas[1])
        else:
            notes.drop("optimizer.betas", f"{show(betas)} is not two numbers")
    for name in ("beta1", "beta2", "eps", "weight_decay"):
        if notes.has(f"optimizer.{name}"):
            put(notes, f"optimizer.{name}", f"optim.{name}", number)
    if kind is not None and "optimizer.weight_decay" not in notes.leaves:
        value = 0.01 if pynative else 0.0
        notes.default(
            "optimizer.weight_decay", "optim.weight_decay", value, f"not given: {value} in MindFormers"
        )
    if notes.has("optimizer.learning_rate"):
        if f"{schedule}.type" in notes.leaves:
            notes.ignored("optimizer.learning_rate", f"{schedule} sets the rate")
        else:
            put(notes, "optimizer.learning_rate", "optim.lr", number)


def _model(notes: RunNotes, section: str) -> None:
    at = f"{section}."
    names = {item.removeprefix(at): item for item in notes.leaves if item.startswith(at)}
    source = next(
        (key for key in (f"{at}type", f"{at}model_type", "model.arch.type") if key in notes.leaves), ""
    )
    kind = str(notes.get(source, "")).lower()
    family = "gpt" if "gpt2" in kind else "llama" if any(word in kind for word in keys.LLAMA_LIKE) else None
    has_experts = "n_routed_experts" in names or "num_experts" in names
    reason = f"{kind or 'this model'} is not trained by this version; see models/"
    if has_experts or "moe" in kind or "deepseek" in kind:
        family, reason = None, keys.SHAPE_OF_EXPERTS
    if family is None and "hidden_size" in names:
        for name in (*keys.SHAPE, *keys.GROUPS):
            if notes.has(f"{at}{name}"):
                notes.drop(f"{at}{name}", reason)
    elif family is not None:
        notes.put(source, "model.family", family)
        _shape(notes, at, family)
    _dtypes(notes, at)


def _shape(notes: RunNotes, at: str, family: str) -> None:
    for name, target in keys.SHAPE.items():
        if notes.has(f"{at}{name}"):
            put(notes, f"{at}{name}", target)
    for name in keys.GROUPS:
        source, groups = f"{at}{name}", notes.get(f"{at}{name}")
        if notes.has(source):
            if groups is None:
                notes.same(source, "as many as query heads")
            else:
                put(notes, source, "model.num_kv_heads")
    kind = str(notes.get(f"{at}model_type", notes.get(f"{at}type", ""))).lower()
    for word, target, what in (
        ("qwen2", "model.qkv_bias", "Qwen2 has"),
        ("qwen3", "model.qk_norm", "Qwen3 has"),
    ):
        if word in kind:
            notes.default(f"{at}hidden_size", target, True, f"{what} it")
    _swiglu_width(notes, at, family)
    length = f"{at}seq_length"
    if notes.has(length):
        put(notes, length, "data.seq_len", integer)
        if notes.value("model.max_seq_len") is None:
            notes.default(length, "model.max_seq_len", notes.value("data.seq_len"), "as long as the samples")


def _swiglu_width(notes: RunNotes, at: str, family: str) -> None:
    """Llama's rule: 8/3 of the width, times a factor, rounded up to a multiple."""
    width, multiple = notes.get(f"{at}hidden_size"), notes.get(f"{at}multiple_of")
    factor = notes.get(f"{at}ffn_dim_multiplier")
    given = notes.get(f"{at}intermediate_size")
    sources = [f"{at}{name}" for name in ("multiple_of", "ffn_dim_multiplier") if notes.has(f"{at}{name}")]
    if given is not None:
        put(notes, f"{at}intermediate_size", "model.ffn_hidden_size", integer)
        for source in sources:
            notes.ignored(source, "intermediate_size is given")
    elif sources and family == "llama" and all(map(_positive, (width, multiple, factor or 1))):
        inner = int((factor or 1.0) * int(8 * width / 3))
        inner = multiple * -(-inner // multiple)
        for source in sources:
            notes.put(source, "model.ffn_hidden_size", inner, "8/3 of the width, rounded up")
    elif notes.has(f"{at}intermediate_size"):
        notes.same(f"{at}intermediate_size", "not set")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def _dtypes(notes: RunNotes, at: str) -> None:
    compute = f"{at}compute_dtype"
    if notes.has(compute):
        put(notes, compute, "precision.policy", dtype, "weights and compute in 16 bits, fp32 master weights")
    for name in ("param_init_type", "params_dtype"):
        source = f"{at}{name}"
        if not notes.has(source):
            continue
        if notes.get(source) in ("float32", "fp32"):
            notes.same(source, "master weights are fp32")
        else:
            notes.drop(source, "weights in 16 bits without an fp32 master are precision.master param")


def _data(notes: RunNotes, section: str) -> None:
    config = f"{section}.config."
    paths = f"{config}data_path"
    if notes.has(paths):
        words = notes.get(paths) if isinstance(notes.get(paths), list) else [notes.get(paths)]
        weighted = len(words) % 2 == 0 and all(str(word).replace(".", "").isdigit() for word in words[::2])
        if weighted and len(words) > 2:
            notes.drop(paths, "a mixture: write data.source mixture with data.parts, a weight for each path")
        else:
            notes.put(paths, "data.source", "megatron")
            notes.put(paths, "data.files", [str(word) for word in (words[1::2] if weighted else words)])
            notes.default(paths, "data.tokenizer", "none", "token files are read as they are")
    for name, target in (("seq_length", "data.seq_len"), ("seed", "train.seed")):
        top = {"seed", "training.seed"} & notes.leaves.keys() if name == "seed" else ()
        if notes.has(f"{config}{name}") and notes.value(target) is None and not top:
            put(notes, f"{config}{name}", target)
        elif notes.has(f"{config}{name}"):
            notes.drop(f"{config}{name}", f"{target} is already told by the model or the top level")
    for name, target in (
        ("reset_attention_mask", "reset_attention"),
        ("reset_position_ids", "reset_positions"),
    ):
        if notes.has(f"{config}{name}"):
            put(notes, f"{config}{name}", f"data.{target}", bool)


def _callbacks(notes: RunNotes) -> None:
    callbacks = notes.get("callbacks")
    if not notes.has("callbacks"):
        return
    for item in callbacks if isinstance(callbacks, list) else []:
        kind = item.get("type") if isinstance(item, Mapping) else item
        if kind == "CheckpointMonitor":
            _put_if(notes, item, "save_checkpoint_steps", "checkpoint.interval")
            _put_if(notes, item, "keep_checkpoint_max", "checkpoint.keep")
        elif kind in ("MFLossMonitor", "LossCallback"):
            _put_if(notes, item, "per_print_times", "train.log_interval")
        else:
            notes.note("callbacks", "untranslatable", f"{show(kind)} has no counterpart")
    if notes.has("callbacks"):
        notes.same("callbacks", "the console, metrics.jsonl and checkpoints are always there")


def _put_if(notes: RunNotes, item: Mapping[str, Any], name: str, target: str) -> None:
    if name in item:
        notes.put("callbacks", target, item[name], f"{item.get('type')}.{name}")

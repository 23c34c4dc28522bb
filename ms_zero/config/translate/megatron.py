"""Megatron-LM arguments as a run file; defaults are those of its argument parser (core 0.12)."""

from collections.abc import Mapping
from typing import Any, Final

from ms_zero.config.findings import show
from ms_zero.config.translate.megatron_keys import (
    CP_METHOD,
    PREFIXES,
    SWITCHES,
    TABLE,
    TOOL,
    VALUES,
)
from ms_zero.config.translate.result import RunNotes, Source, Translation
from ms_zero.config.translate.table import apply, finish_unknown, integer, number, put, put_context


def translate_megatron(source: Source) -> Translation:
    """Translate the arguments of `pretrain_gpt.py`."""
    notes = RunNotes(_values(source.leaves))
    for name, words in source.leaves.items():
        if any("$" in word for word in words):
            notes.drop(name, "holds a shell variable that the file does not set; fill it in")
    _model(notes)
    _batch(notes)
    _schedule(notes)
    _optimizer(notes)
    _parallel(notes)
    _precision(notes)
    _memory(notes)
    _data(notes)
    put_context(notes, CP_METHOD, "--context-parallel-size", {"p2p": "ring", "a2a": "ulysses"})
    apply(notes, TABLE)
    for name in notes.left():
        if name.removeprefix("--").replace("_", "-").startswith(tuple(PREFIXES)):
            notes.drop(name, _reason_of(name))
    finish_unknown(notes, _known(), TOOL)
    return notes.result()


def _known() -> list[str]:
    return [*TABLE, *VALUES, *SWITCHES, CP_METHOD]


def _values(leaves: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return each argument with one value, a list, or True for a switch."""
    found: dict[str, Any] = {}
    for name, words in leaves.items():
        found[name] = True if not words else _scalar(words[0]) if len(words) == 1 else [*map(_scalar, words)]
    return found


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _reason_of(name: str) -> str:
    bare = name.removeprefix("--").replace("_", "-")
    prefix = max((item for item in PREFIXES if bare.startswith(item)), key=len)
    return PREFIXES.get(prefix, "has no counterpart")


def _on(notes: RunNotes, name: str) -> bool:
    return notes.get(name) is True


def _model(notes: RunNotes) -> None:
    if not notes.has("--hidden-size"):
        return
    rope = notes.get("--position-embedding-type") == "rope" or _on(notes, "--use-rotary-position-embeddings")
    rms, gated = notes.get("--normalization") == "RMSNorm", _on(notes, "--swiglu")
    family = {(True, True, True): "llama", (False, False, False): "gpt"}.get((rope, rms, gated))
    if family is None or notes.has("--num-experts") or _on(notes, "--multi-latent-attention"):
        _refuse_model(notes, rope, rms, gated)
        return
    notes.put("--hidden-size", "model.family", family, "by positions, norm and activation")
    notes.put("--hidden-size", "model.hidden_size", notes.get("--hidden-size"))
    for name in (
        "--position-embedding-type",
        "--use-rotary-position-embeddings",
        "--normalization",
        "--swiglu",
    ):
        if notes.has(name):
            notes.same(name, f"what family {family} has")
    for name, target in _SHAPE.items():
        if notes.has(name):
            put(notes, name, target)
    _attention(notes, family)
    _biases(notes, family)
    tied = not _on(notes, "--untie-embeddings-and-output-weights")
    switch = "--untie-embeddings-and-output-weights"
    if notes.has(switch):
        notes.put(switch, "model.tie_embeddings", False)
    else:
        notes.default(switch, "model.tie_embeddings", tied, "not given: Megatron ties them")
    _dropout(notes)


_SHAPE: Final = {
    "--num-layers": "model.num_layers",
    "--num-attention-heads": "model.num_heads",
    "--ffn-hidden-size": "model.ffn_hidden_size",
    "--max-position-embeddings": "model.max_seq_len",
    "--norm-epsilon": "model.norm_eps",
    "--layernorm-epsilon": "model.norm_eps",
    "--init-method-std": "model.init_std",
    "--rotary-base": "model.rope_theta",
    "--padded-vocab-size": "model.vocab_size",
    "--kv-channels": "model.head_dim",
}


def _refuse_model(notes: RunNotes, rope: bool, rms: bool, gated: bool) -> None:
    parts = f"{'rotary' if rope else 'learned'} positions, {'RMSNorm' if rms else 'LayerNorm'}"
    reason = f"no model family here has {parts} and {'SwiGLU' if gated else 'GELU'}"
    if notes.has("--num-experts"):
        reason = "the shape of a model with experts is not translated; describe it with model.family moe"
    elif _on(notes, "--multi-latent-attention"):
        reason = "latent attention is not translated; describe it with model.latent of family moe"
    names = ["--hidden-size", *_SHAPE, "--group-query-attention", "--num-query-groups", "--swiglu"]
    names += ["--position-embedding-type", "--normalization", "--disable-bias-linear", "--add-qkv-bias"]
    names += ["--qk-layernorm", "--untie-embeddings-and-output-weights", "--use-rotary-position-embeddings"]
    for name in names:
        if notes.has(name):
            notes.drop(name, reason)


def _attention(notes: RunNotes, family: str) -> None:
    grouped = _on(notes, "--group-query-attention")
    if notes.has("--group-query-attention"):
        notes.same("--group-query-attention", "see model.num_kv_heads")
    groups = "--num-query-groups"
    if notes.has(groups):
        if grouped:
            put(notes, groups, "model.num_kv_heads")
        else:
            notes.ignored(
                groups, "only read with --group-query-attention: every query head has its own key head"
            )
    elif grouped and family == "llama":
        notes.default(groups, "model.num_kv_heads", 1, "not given: 1 in Megatron")
    if notes.has("--qk-layernorm"):
        notes.put("--qk-layernorm", "model.qk_norm", True)
    if notes.has("--use-rope-scaling"):
        notes.drop("--use-rope-scaling", "set model.rope_scaling with the factors of the model")


def _biases(notes: RunNotes, family: str) -> None:
    without = "--disable-bias-linear"
    if notes.has(without):
        if family == "llama":
            notes.same(without, "family llama has no biases")
        else:
            notes.drop(without, "family gpt has biases")
    elif family == "llama":
        notes.drop(without, "not given: Megatron adds biases to every layer, family llama has none")
    if notes.has("--add-qkv-bias"):
        notes.put("--add-qkv-bias", "model.qkv_bias", True)


def _dropout(notes: RunNotes) -> None:
    for name in ("--attention-dropout", "--hidden-dropout"):
        if name not in notes.leaves:
            notes.drop(name, "not given: 0.1 in Megatron; there is no dropout here")


def _batch(notes: RunNotes) -> None:
    for name, target in (
        ("--micro-batch-size", "micro_batch_size"),
        ("--global-batch-size", "global_batch_size"),
    ):
        if notes.has(name):
            put(notes, name, f"train.{target}")
    if "--global-batch-size" not in notes.leaves and "--micro-batch-size" in notes.leaves:
        reason = "not given: Megatron takes one micro-batch a data-parallel rank"
        notes.default("--global-batch-size", "train.accumulation_steps", 1, reason)
    ramp = notes.get("--rampup-batch-size")
    if notes.has("--rampup-batch-size"):
        if isinstance(ramp, list) and len(ramp) == 3:
            for name, value in zip(("rampup_start", "rampup_increment", "rampup_samples"), ramp, strict=True):
                notes.put("--rampup-batch-size", f"train.{name}", value)
        else:
            notes.drop("--rampup-batch-size", "expected start, increment and samples")
    _steps(notes)


def _steps(notes: RunNotes) -> None:
    if notes.has("--train-iters"):
        put(notes, "--train-iters", "train.steps")
    samples, batch = notes.get("--train-samples"), notes.get("--global-batch-size")
    if notes.has("--train-samples"):
        _in_steps(notes, "--train-samples", "train.steps", samples, batch)


def _in_steps(notes: RunNotes, name: str, target: str, samples: Any, batch: Any) -> None:
    """Write samples as steps of the global batch, when that is exact."""
    if notes.has("--rampup-batch-size") or "--rampup-batch-size" in notes.leaves:
        notes.drop(name, "counts samples while the batch grows; tell the number of steps")
    elif isinstance(samples, int) and isinstance(batch, int) and batch > 0 and samples % batch == 0:
        notes.put(name, target, samples // batch, f"{samples} samples / {batch}")
    else:
        notes.drop(name, "is no whole number of global batches; tell the number of steps")


def _schedule(notes: RunNotes) -> None:
    if not notes.has("--lr"):
        return
    put(notes, "--lr", "optim.lr", number)
    style = str(notes.get("--lr-decay-style", "linear"))
    shape = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}.get(style)
    if notes.has("--lr-decay-style"):
        if shape is None:
            notes.drop("--lr-decay-style", f"{show(style)} is not offered; see optim.schedule")
        else:
            notes.put("--lr-decay-style", "optim.schedule", shape)
    elif "--lr-decay-style" not in notes.leaves:
        notes.default("--lr-decay-style", "optim.schedule", "linear", "not given: linear in Megatron")
    if notes.has("--min-lr"):
        put(notes, "--min-lr", "optim.min_lr", number)
    _warmup(notes)
    _decay(notes, shape)


def _warmup(notes: RunNotes) -> None:
    steps = notes.value("train.steps")
    if notes.has("--lr-warmup-iters"):
        put(notes, "--lr-warmup-iters", "optim.warmup_steps", integer)
    if notes.has("--lr-warmup-samples"):
        samples, batch = notes.get("--lr-warmup-samples"), notes.get("--global-batch-size")
        _in_steps(notes, "--lr-warmup-samples", "optim.warmup_steps", samples, batch)
    if notes.has("--lr-warmup-fraction"):
        decay = notes.get("--lr-decay-iters", steps)
        if isinstance(decay, int):
            share = notes.get("--lr-warmup-fraction")
            remark = f"of {decay} steps"
            notes.put("--lr-warmup-fraction", "optim.warmup_steps", round(float(share) * decay), remark)
        else:
            notes.drop("--lr-warmup-fraction", "a share of the decay, whose length in steps is not told")
    if not any(name.startswith("--lr-warmup") for name in notes.leaves):
        notes.default("--lr-warmup-iters", "optim.warmup_steps", 0, "not given: no warm-up in Megatron")
    if notes.has("--lr-warmup-init"):
        if notes.get("--lr-warmup-init") == 0:
            notes.same("--lr-warmup-init", "the warm-up starts at zero")
        else:
            notes.drop("--lr-warmup-init", "the warm-up here starts at zero")


def _decay(notes: RunNotes, shape: str | None) -> None:
    steps = notes.value("train.steps")
    for name in ("--lr-decay-iters", "--lr-decay-samples"):
        if not notes.has(name):
            continue
        given = notes.get(name)
        if name == "--lr-decay-samples" and isinstance(notes.get("--global-batch-size"), int):
            given = given / notes.get("--global-batch-size")
        if given == steps:
            notes.same(name, "the decay ends with the run")
        else:
            notes.drop(name, "the decay here ends with the run, at train.steps")
    if notes.has("--lr-wsd-decay-iters"):
        put(notes, "--lr-wsd-decay-iters", "optim.decay_steps")
    if notes.has("--lr-wsd-decay-style"):
        if notes.get("--lr-wsd-decay-style") == "linear" and shape == "wsd":
            notes.same("--lr-wsd-decay-style", "the last decay is linear")
        else:
            notes.drop("--lr-wsd-decay-style", "the last decay here is linear")


def _optimizer(notes: RunNotes) -> None:
    kind = notes.get("--optimizer", "adam")
    if notes.has("--optimizer"):
        if kind in ("adam", "sgd"):
            notes.put(
                "--optimizer", "optim.kind", {"adam": "adamw", "sgd": "sgd"}[kind], "decay is decoupled"
            )
        else:
            notes.drop("--optimizer", f"{show(kind)} is not offered; optim.kind is adamw or sgd")
    if kind == "sgd" and notes.get("--sgd-momentum", 0.9) != 0:
        notes.drop("--sgd-momentum", "sgd here has no momentum (0.9 in Megatron by default)")
    standard = {
        "--adam-beta1": ("optim.beta1", 0.9),
        "--adam-beta2": ("optim.beta2", 0.999),
        "--adam-eps": ("optim.eps", 1e-8),
        "--weight-decay": ("optim.weight_decay", 0.01),
        "--clip-grad": ("optim.clip_norm", 1.0),
    }
    for name, (target, value) in standard.items():
        if notes.has(name):
            put(notes, name, target, number)
        elif name not in notes.leaves and "--lr" in notes.leaves and not (kind == "sgd" and "adam" in name):
            notes.default(name, target, value, f"not given: {value} in Megatron")


def _parallel(notes: RunNotes) -> None:
    tensor = notes.get("--tensor-model-parallel-size", 1)
    sequence = "--sequence-parallel"
    if notes.has(sequence):
        if tensor == 1:
            notes.ignored(sequence, "Megatron turns it off when --tensor-model-parallel-size is 1")
        else:
            notes.put(sequence, "parallel.sequence_parallel", True)
    strategy, sharded = "--data-parallel-sharding-strategy", _on(notes, "--use-distributed-optimizer")
    fsdp = next((n for n in ("--use-megatron-fsdp", "--use-custom-fsdp") if notes.has(n)), None)
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if fsdp is not None:
        kind = str(notes.get(strategy, "no_shard"))
        if kind in stages:
            notes.put(fsdp, "parallel.zero_stage", stages[kind], f"{strategy} {kind}")
        else:
            notes.drop(fsdp, f"{show(kind)} is not a strategy: {', '.join(stages)}")
        if notes.has(strategy):
            notes.same(strategy, f"told with {fsdp}")
    elif notes.has(strategy):
        notes.ignored(strategy, "only read with --use-megatron-fsdp")
    if notes.has("--use-torch-fsdp2"):
        notes.put("--use-torch-fsdp2", "parallel.zero_stage", 3)
    if notes.has("--use-distributed-optimizer"):
        if notes.value("parallel.zero_stage") is None:
            remark = "optimizer states are sharded, gradients reduce-scattered"
            notes.put("--use-distributed-optimizer", "parallel.zero_stage", 1, remark)
        else:
            notes.same("--use-distributed-optimizer", "the sharding strategy says more")
    _overlap(notes, sharded or fsdp is not None)


def _overlap(notes: RunNotes, sharded: bool) -> None:
    if notes.has("--overlap-grad-reduce"):
        notes.same("--overlap-grad-reduce", "buckets are reduced while the backward pass goes on")
    if notes.has("--overlap-param-gather"):
        if sharded:
            notes.drop("--overlap-param-gather", "updated weights are gathered after the update")
        else:
            notes.ignored("--overlap-param-gather", "only read with --use-distributed-optimizer")
    for name in ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"):
        if notes.has(name):
            _virtual_stages(notes, name)


def _virtual_stages(notes: RunNotes, name: str) -> None:
    layers, stages = notes.get("--num-layers"), notes.get("--pipeline-model-parallel-size", 1)
    chunks = notes.get(name)
    counts = all(isinstance(number, int) and number > 0 for number in (layers, stages, chunks))
    if "per-virtual" not in name:
        put(notes, name, "parallel.virtual_stages", integer)
    elif counts and layers % (stages * chunks) == 0:
        notes.put(name, "parallel.virtual_stages", layers // (stages * chunks))
    else:
        notes.drop(name, "needs --num-layers, divisible by stages x layers per virtual stage")


def _precision(notes: RunNotes) -> None:
    half = next((name for name in ("--fp16", "--bf16") if notes.has(name)), None)
    if "--fp16" in notes.leaves and "--bf16" in notes.leaves:
        notes.drop("--fp16", "Megatron refuses --fp16 together with --bf16; keep one")
        half = "--bf16"
    if half is None:
        return
    name = half.removeprefix("--")
    notes.put(half, "precision.policy", name)
    in_fp32 = _on(notes, "--accumulate-allreduce-grads-in-fp32") or name == "bf16"
    flag = "--accumulate-allreduce-grads-in-fp32"
    if notes.has(flag):
        notes.put(flag, "precision.accumulate", "fp32")
        notes.put(flag, "precision.reduce", "fp32")
    elif not in_fp32:
        reason = "not given: Megatron adds up and reduces fp16 gradients in fp16"
        notes.default(flag, "precision.accumulate", name, reason)
        notes.default(flag, "precision.reduce", name, reason)
    if notes.has("--grad-reduce-in-bf16"):
        notes.replace(flag, "precision.reduce", "same", "told by --grad-reduce-in-bf16")
        notes.put("--grad-reduce-in-bf16", "precision.reduce", "bf16")
    if name == "fp16":
        _loss_scale(notes)
    for item in (
        "--loss-scale",
        "--initial-loss-scale",
        "--min-loss-scale",
        "--loss-scale-window",
        "--hysteresis",
    ):
        if notes.has(item):
            notes.ignored(item, f"only read with --fp16, but the run is {name}")


def _loss_scale(notes: RunNotes) -> None:
    if notes.has("--loss-scale"):
        put(notes, "--loss-scale", "precision.initial_scale", number)
        notes.put("--loss-scale", "precision.loss_scale", "static")
        for name in ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"):
            if notes.has(name):
                notes.ignored(name, "only read for a dynamic scale; --loss-scale is constant")
        return
    notes.default("--loss-scale", "precision.loss_scale_convention", "megatron", "the rules of its scaler")
    dynamic = {
        "--initial-loss-scale": ("precision.initial_scale", number, 2.0**32),
        "--min-loss-scale": ("precision.min_scale", number, 1.0),
        "--loss-scale-window": ("precision.growth_interval", integer, 1000),
        "--hysteresis": ("precision.hysteresis", integer, 2),
    }
    for name, (target, convert, standard) in dynamic.items():
        if notes.has(name):
            put(notes, name, target, convert)
        elif name not in notes.leaves:
            notes.default(name, target, standard, f"not given: {standard:g} in Megatron")


def _memory(notes: RunNotes) -> None:
    kind = "--recompute-granularity"
    full = notes.get(kind) == "full"
    if notes.has("--recompute-activations"):
        notes.put("--recompute-activations", "memory.recompute", "selective")
    if notes.has(kind):
        _recompute(notes, full)
    for name in ("--recompute-method", "--recompute-num-layers"):
        if notes.has(name):
            if full:
                notes.same(name, f"told by {kind}")
            else:
                notes.ignored(name, f"only read with {kind} full")
    if notes.has("--recompute-modules"):
        notes.drop("--recompute-modules", "what selective recompute leaves out is fixed: the attention core")
    if notes.has("--optimizer-cpu-offload"):
        notes.put("--optimizer-cpu-offload", "offload.optimizer", "cpu")
    if notes.has("--optimizer-offload-fraction"):
        if _on(notes, "--optimizer-cpu-offload"):
            put(notes, "--optimizer-offload-fraction", "offload.fraction", number)
        else:
            notes.ignored("--optimizer-offload-fraction", "only read with --optimizer-cpu-offload")


def _recompute(notes: RunNotes, full: bool) -> None:
    kind, method = "--recompute-granularity", notes.get("--recompute-method")
    every = notes.get("--recompute-num-layers", 1)
    if not full:
        notes.put(
            kind, "memory.recompute", "selective" if notes.get(kind) == "selective" else notes.get(kind)
        )
    elif method == "uniform" and every != 1:
        if notes.put(kind, "memory.recompute", "every_k", "inputs of every k-th block are kept"):
            notes.default(kind, "memory.recompute_every", every, "--recompute-num-layers")
    elif method == "block":
        notes.drop(
            kind,
            f"recompute of the first {every} blocks of a stage only is not offered; see memory.budget_gb",
        )
    else:
        notes.put(kind, "memory.recompute", "full")


def _data(notes: RunNotes) -> None:
    paths = notes.get("--data-path")
    if notes.has("--data-path"):
        _paths(notes, [paths] if not isinstance(paths, list) else paths)
    split = str(notes.get("--split", "969,30,1"))
    if "--data-path" in notes.leaves:
        _split(notes, split)
    if "--reset-attention-mask" in notes.leaves:
        notes.put("--reset-attention-mask", "data.reset_attention", True)
    if "--reset-position-ids" in notes.leaves:
        notes.put("--reset-position-ids", "data.reset_positions", True)


def _paths(notes: RunNotes, words: list[Any]) -> None:
    texts = [str(word) for word in words]
    weighted = (
        len(words) > 1 and len(words) % 2 == 0 and all(isinstance(word, int | float) for word in words[::2])
    )
    if weighted and len(words) > 2:
        notes.drop(
            "--data-path", "a mixture: write data.source mixture with data.parts, a weight for each path"
        )
        return
    notes.put("--data-path", "data.source", "megatron")
    notes.put("--data-path", "data.files", texts[1::2] if weighted else texts)
    tokenizer = "told by the model's vocab_size; token files are read as they are"
    notes.default("--data-path", "data.tokenizer", "none", tokenizer)


def _split(notes: RunNotes, split: str) -> None:
    try:
        parts = [float(part) for part in split.split(",")]
        share = parts[1] / sum(parts) if len(parts) > 1 else 0.0
    except (ValueError, ZeroDivisionError):
        notes.drop("--split", f"{show(split)} is not a list of shares")
        return
    remark = "the share for validation; there is no test part"
    if notes.has("--split"):
        notes.put("--split", "data.validation_fraction", round(share, 12), remark)
    else:
        notes.default(
            "--split", "data.validation_fraction", round(share, 12), "not given: 969,30,1 in Megatron"
        )

"""Rules across keys: each has an id, an explanation and a check; `EXPLANATIONS` tells about every finding."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ms_zero import hardware
from ms_zero.config import auto_parallel, schema
from ms_zero.config.bind import Facts
from ms_zero.config.derive import Problem
from ms_zero.config.explanations import READING, Explanation
from ms_zero.config.findings import Finding, show
from ms_zero.errors import UserError
from ms_zero.pipeline.balance import refuse_counts
from ms_zero.pipeline.schedule import NAMES, is_file, read_csv, refuse, refuse_use
from ms_zero.resources import did_you_mean, nearest

Check = Callable[[Facts], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Rule(Explanation):
    """An explanation with its check.

    Args:
        reads: Dotted keys that must have a value for the check to run.
        check: Yields (dotted key, message) for each violation; None when `derive` finds the violations.

    """

    reads: tuple[str, ...] = ()
    check: Check | None = None


def run_rules(facts: Facts, problems: list[Problem]) -> list[Finding]:
    """Turn the problems of deriving into findings, then run every rule whose keys have values.

    Keys without effect go back to their defaults first, so that no rule stumbles over them; derived ones fit.
    """
    ignored = [path for path in ignored_keys(facts.values) if _key(path).default is not schema.AUTO]
    for path in ignored:
        facts.values[path] = _key(path).default
    findings = [_finding(facts, *problem) for problem in problems]
    for rule in RULES:
        if rule.check is not None and facts.known(*rule.reads):
            findings += [_finding(facts, rule.id, path, message) for path, message in rule.check(facts)]
    facts.origins.update(dict.fromkeys(ignored, "default"))
    return findings


def ignored_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> why, for every key that has no effect with these values of the others."""
    ignored = {}
    for prefix, section in schema.SECTIONS.items():
        for name, (spec, _) in schema.keys_of(section).items():
            if spec.used_when is None:
                continue
            switch, used = f"{prefix}.{spec.used_when[0]}", spec.used_when[1]
            if switch in values and values[switch] not in used:
                ignored[f"{prefix}.{name}"] = f"{switch} is {values[switch]}"
    return ignored


def _finding(facts: Facts, rule: str, path: str, message: str) -> Finding:
    return Finding(rule, EXPLANATIONS[rule].severity, path, facts.where(path), message)


def _key(path: str) -> schema.Key:
    prefix, name = path.split(".")
    return schema.keys_of(schema.SECTIONS[prefix])[name][0]


def _switch_layer(facts: Facts, path: str) -> int:
    switch, _ = _key(path).used_when
    return facts.layer(f"{path.split('.')[0]}.{switch}")


def _check_no_effect(facts: Facts) -> Iterator[tuple[str, str]]:
    for path, why in ignored_keys(facts.values).items():
        if path in facts.layers and facts.layer(path) >= _switch_layer(facts, path):
            yield path, f"has no effect because {why}; remove it or change that"


def _check_lost_effect(facts: Facts) -> Iterator[tuple[str, str]]:
    for path, why in ignored_keys(facts.values).items():
        if path in facts.layers and facts.layer(path) < _switch_layer(facts, path):
            yield path, f"has no effect any more because {why}, set later"


def _check_heads(facts: Facts) -> Iterator[tuple[str, str]]:
    width, heads = facts.values["model.hidden_size"], facts.values["model.num_heads"]
    if facts.values["model.family"] == "gpt" and width % heads:
        yield "model.num_heads", f"{heads} does not divide hidden_size {width}; change one of them"


def _check_kv_heads(facts: Facts) -> Iterator[tuple[str, str]]:
    heads, kv_heads = facts.values["model.num_heads"], facts.values["model.num_kv_heads"]
    if heads % kv_heads:
        yield "model.num_kv_heads", f"{kv_heads} does not divide num_heads {heads}; use a divisor of {heads}"


def _check_head_dim(facts: Facts) -> Iterator[tuple[str, str]]:
    is_latent = "model.latent.rope_head_dim" in facts.values  # which turns a part of the head
    if facts.values["model.head_dim"] % 2 and not is_latent:
        message = f"{facts.values['model.head_dim']} is odd; rotary positions turn pairs, use an even width"
        yield "model.head_dim", message


def _check_vocab(facts: Facts) -> Iterator[tuple[str, str]]:
    rows, needed = facts.values["model.vocab_size"], facts.tokenizer_vocab
    if needed is not None and rows < needed:
        tokenizer = facts.values["data.tokenizer"]
        name = facts.values["data.tokenizer_file"] if tokenizer == "file" else f"the {tokenizer} tokenizer"
        yield "model.vocab_size", f"{rows} rows cannot hold the {needed} tokens of {name}; use auto"


def _check_rope_scaling(facts: Facts) -> Iterator[tuple[str, str]]:
    low = facts.values["model.rope_scaling.low_freq_factor"]
    high = facts.values["model.rope_scaling.high_freq_factor"]
    if low >= high:
        yield "model.rope_scaling.low_freq_factor", f"{low} is not below high_freq_factor {high}"


def _check_experts(facts: Facts) -> Iterator[tuple[str, str]]:
    names = ("num_experts", "experts_per_token", "expert_groups", "groups_per_token")
    experts, chosen, groups, visited = (facts.values[f"model.{name}"] for name in names)
    if experts % groups:
        yield "model.expert_groups", f"{groups} does not divide num_experts {experts}; use a divisor of it"
    elif visited > groups:
        yield "model.groups_per_token", f"{visited} is more than expert_groups {groups}; lower it"
    elif chosen > experts // groups * visited:
        most = experts // groups * visited
        message = f"{chosen} is more than the {most} experts that a token may visit; use at most {most}"
        yield "model.experts_per_token", message


def _check_expert_layers(facts: Facts) -> Iterator[tuple[str, str]]:
    dense, layers = facts.values["model.dense_layers"], facts.values["model.num_layers"]
    if dense > layers:
        yield "model.dense_layers", f"{dense} is more than num_layers {layers}; lower it"
    elif dense and facts.values["model.ffn_hidden_size"] is None:
        yield "model.ffn_hidden_size", f"missing; {dense} dense_layers need the width of their MLP"
    if facts.values["model.shared_gate"] and not facts.values["model.shared_ffn_hidden_size"]:
        yield "model.shared_gate", "true, but shared_ffn_hidden_size is 0; there is nothing to gate"


def _check_latent(facts: Facts) -> Iterator[tuple[str, str]]:
    rope = facts.values["model.latent.rope_head_dim"]
    if rope % 2:
        message = f"{rope} is odd; rotary positions turn pairs, use an even width"
        yield "model.latent.rope_head_dim", message
    for name in ("num_kv_heads", "head_dim", "qkv_bias", "qk_norm"):
        if f"model.{name}" in facts.layers and facts.values.get(f"model.{name}"):
            message = "is not for latent attention, whose widths are those of model.latent; remove one"
            yield f"model.{name}", message


def _check_seq_len(facts: Facts) -> Iterator[tuple[str, str]]:
    length, limit = facts.values["data.seq_len"], facts.values["model.max_seq_len"]
    if length > limit:
        message = f"{length} tokens do not fit model.max_seq_len {limit}; lower the one or raise the other"
        yield "data.seq_len", message


def _check_files(facts: Facts) -> Iterator[tuple[str, str]]:
    source = facts.values["data.source"]
    if source in _FILE_SOURCES and not facts.values["data.files"]:
        yield "data.files", f"missing; data.source is {source}, so name at least one file or pattern"


def _check_no_tokenizer(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["data.tokenizer"] != "none":
        return
    parts = [part.source for part in facts.values["data.parts"]]
    for source in parts if facts.values["data.source"] == "mixture" else [facts.values["data.source"]]:
        if source != "megatron":
            yield "data.tokenizer", f"none cannot encode the text of source {source}; name a tokenizer"
            return


def _check_parts(facts: Facts) -> Iterator[tuple[str, str]]:
    parts = facts.values["data.parts"]
    if facts.values["data.source"] != "mixture":
        return
    if not parts:
        yield "data.parts", "missing; data.source is mixture, so list its parts"
    for number, part in enumerate(parts):
        path = f"data.parts[{number}].files"
        if part.source in _FILE_SOURCES and not part.files:
            yield path, f"missing; the part's source is {part.source}, so name at least one file or pattern"
        elif part.source not in _FILE_SOURCES and part.files:
            yield path, f"has no effect because the part's source is {part.source}; remove it or change that"


def _check_part_weights(facts: Facts) -> Iterator[tuple[str, str]]:
    parts = facts.values["data.parts"] if facts.values["data.source"] == "mixture" else ()
    total = sum(part.weight for part in parts)
    for number, part in enumerate(parts):
        if part.weight * _MIXTURE_PERIOD < total:
            message = f"{part.weight} is less than 1/{_MIXTURE_PERIOD} of all weights; raise it"
            yield f"data.parts[{number}].weight", message


def _check_held_out(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["train.eval_interval"] > 0 and facts.values["data.validation_fraction"] == 0:
        message = "0 holds out nothing to evaluate on; raise it or set train.eval_interval to 0"
        yield "data.validation_fraction", message


def _check_intervals(facts: Facts) -> Iterator[tuple[str, str]]:
    steps = facts.values["train.steps"]
    for path in ("train.eval_interval", "train.log_interval", "checkpoint.interval"):
        if facts.known(path) and facts.values[path] > steps:
            yield path, f"{facts.values[path]} is more than train.steps {steps}, so it only comes at the end"


def _check_rampup(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["train.rampup_samples"] == 0:
        return
    full, start, step = (
        facts.values[f"train.{name}"] for name in ("global_batch_size", "rampup_start", "rampup_increment")
    )
    share = facts.values["train.micro_batch_size"]
    share *= facts.values["parallel.dp_replicate"] * facts.values["parallel.dp_shard"]
    if start is None or step is None:
        missing = "train.rampup_start" if start is None else "train.rampup_increment"
        yield missing, "missing; a ramp-up needs its start and its increment"
    elif start % share:
        yield "train.rampup_start", f"{start} is not a multiple of micro_batch_size x dp = {share}"
    elif start >= full:
        yield "train.rampup_start", f"{start} is not below global_batch_size {full}, to which it grows"
    elif step % share or (full - start) % step:
        message = (
            f"{step} must be a multiple of micro_batch_size x dp = {share} and divide "
            f"global_batch_size - rampup_start = {full - start}"
        )
        yield "train.rampup_increment", message


def _check_warmup(facts: Facts) -> Iterator[tuple[str, str]]:
    warmup, steps = facts.values["optim.warmup_steps"], facts.values["train.steps"]
    if warmup >= steps:
        message = f"warm-up takes {warmup} of {steps} steps, so the learning rate only rises; lower it"
        yield "optim.warmup_steps", message


def _check_decay_given(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["optim.schedule"] == "wsd" and facts.values["optim.decay_steps"] is None:
        yield "optim.decay_steps", "missing; the wsd schedule needs the length of its final decay"


def _check_decay_fits(facts: Facts) -> Iterator[tuple[str, str]]:
    decay, warmup = facts.values["optim.decay_steps"], facts.values["optim.warmup_steps"]
    steps = facts.values["train.steps"]
    if facts.values["optim.schedule"] == "wsd" and decay is not None and warmup + decay > steps:
        message = f"warm-up {warmup} and decay {decay} take more than train.steps {steps}; shorten one"
        yield "optim.decay_steps", message


def _check_min_lr(facts: Facts) -> Iterator[tuple[str, str]]:
    low, peak = facts.values["optim.min_lr"], facts.values["optim.lr"]
    if low > peak:
        yield "optim.min_lr", f"{low} is above the peak optim.lr {peak}; it must be at most that"


def _check_mesh(facts: Facts) -> Iterator[tuple[str, str]]:
    product = 1
    for axis in _AXES:
        product *= facts.values[f"parallel.{axis}"]
    if product != facts.world_size:
        degrees = " x ".join(str(facts.values[f"parallel.{axis}"]) for axis in _AXES)
        message = (
            f"{' x '.join(_AXES)} = {degrees} = {product}, but the number of workers is {facts.world_size}; "
            f"start {product} workers or set parallel.dp_shard=auto"
        )
        yield "parallel.dp_shard", message


def _check_context_parallel(facts: Facts) -> Iterator[tuple[str, str]]:
    degree, method = facts.values["parallel.cp"], facts.values["parallel.context"]
    parts = 2 * degree if method == "ring" else degree
    length = facts.values["data.seq_len"]
    if degree > 1 and length % parts:
        message = f"{length} tokens cannot be cut into {parts} chunks by parallel.cp {degree} ({method})"
        yield "data.seq_len", f"{message}; use a multiple of {parts}"
    heads, tp = facts.values["model.num_heads"], facts.values["parallel.tp"]
    if degree == 1 or method == "ring" or heads % tp:
        return
    if heads // tp % degree:
        message = f"{degree} does not divide the {heads // tp} heads of a rank; use a divisor, or the ring"
        yield "parallel.cp", message
    kv_heads = facts.values.get("model.num_kv_heads")
    own = max(1, kv_heads // tp) if isinstance(kv_heads, int) else degree
    if own % degree and degree % own:
        message = f"{degree} is neither a divisor nor a multiple of the {own} key-value heads of a rank"
        yield "parallel.cp", f"{message}; use one, or the ring"


def _check_graph_engine(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["engine.kind"] != "graph":
        return
    limits = dict(_GRAPH_ENGINE)
    has_experts = facts.values["model.family"] == "moe"
    if has_experts:
        limits |= _GRAPH_EXPERTS
    if facts.values["hardware.target"] == "CPU":
        limits |= _GRAPH_ON_CPU | ({"precision.compute": ("fp32",)} if has_experts else {})
    elif _is_cut(facts):
        limits |= _GRAPH_CUT
    for path, available in limits.items():
        if facts.known(path) and facts.values[path] not in available:
            value = show(facts.values[path]).strip("'")
            options = " or ".join(show(each).strip("'") for each in available)
            yield path, f"{value} is not available with engine graph; only {options} is"


def _is_cut(facts: Facts) -> bool:
    return any(facts.values.get(path, options[0]) not in options for path, options in _GRAPH_UNCUT.items())


def _check_auto_parallel(facts: Facts) -> Iterator[tuple[str, str]]:
    chosen = facts.values["engine.kind"], facts.values["hardware.target"]
    if chosen == ("graph", "Ascend") and _is_cut(facts):
        yield from auto_parallel.problems(facts.values.get)


def _check_compiled_only(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["engine.kind"] == "graph":
        return
    name, parts = facts.values["parallel.schedule"], facts.values["parallel.micro_batch_interleave"]
    if facts.values["parallel.pp"] > 1 and name in auto_parallel.COMPILED:
        message = f"{name} is an order of MindSpore's compiler"
        yield "parallel.schedule", f"{message}; set engine to graph, or use zb-h1"
    if parts > 1:
        message = f"{parts} has no use with engine eager, which does not compute while it sums"
        yield "parallel.micro_batch_interleave", f"{message}; set it to 1, or engine to graph on Ascend"


def _check_graph_untried(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["engine.kind"] == "graph" and facts.values["hardware.target"] == "Ascend":
        yield "engine.kind", "graph compiles for Ascend, but no NPU has run it yet; watch the first steps"


def _check_tensor_parallel(facts: Facts) -> Iterator[tuple[str, str]]:
    degree = facts.values["parallel.tp"]
    heads, kv_heads = facts.values["model.num_heads"], facts.values.get("model.num_kv_heads")
    if heads % degree:
        yield "parallel.tp", f"{degree} does not divide model.num_heads {heads}; use a divisor of it"
    elif isinstance(kv_heads, int) and kv_heads % degree and degree % kv_heads:
        message = f"{degree} is neither a divisor nor a multiple of model.num_kv_heads {kv_heads}; use one"
        yield "parallel.tp", message
    names = ("vocab_size", *(f"{part}ffn_hidden_size" for part in ("", "expert_", "shared_")))
    for name in names:
        size = facts.values.get(f"model.{name}")
        if isinstance(size, int) and 0 < size < degree:
            yield "parallel.tp", f"{degree} is more than model.{name} {size}; lower it"


def _check_sequence_parallel(facts: Facts) -> Iterator[tuple[str, str]]:
    degree, length = facts.values["parallel.tp"], facts.values["data.seq_len"]
    if not facts.values["parallel.sequence_parallel"]:
        return
    if degree == 1:
        message = "true, but parallel.tp is 1, and its ranks cut the sequence; raise tp or remove this"
        yield "parallel.sequence_parallel", message
    elif length % (degree * facts.values["parallel.cp"]):
        parts = f"parallel.tp {degree}"
        if facts.values["parallel.cp"] > 1:
            parts = f"parallel.cp x tp = {degree * facts.values['parallel.cp']}"
        yield "data.seq_len", f"{length} tokens cannot be cut by {parts}; use a multiple of it"


def _check_tensor_parallel_node(facts: Facts) -> Iterator[tuple[str, str]]:
    name, degree = facts.values["hardware.device"], facts.values["parallel.tp"]
    if name is None or name not in hardware.device_names():
        return
    node = hardware.load_device(name).devices_per_node
    if node is not None and facts.world_size > node and node % degree:
        message = (
            f"{degree} does not divide the {node} devices of a {name} node: some groups reach over two nodes "
            f"and are as slow as the network; use a divisor of {node}"
        )
        yield "parallel.tp", message


def _check_expert_parallel(facts: Facts) -> Iterator[tuple[str, str]]:
    degree, family = facts.values["parallel.ep"], facts.values["model.family"]
    if degree == 1:
        return
    if family != "moe":
        yield "parallel.ep", f"{degree}, but a {family} model has no experts to share out; use 1"
        return
    fold = facts.values["parallel.dp_shard"] * facts.values["parallel.cp"]
    if fold % degree:
        yield "parallel.ep", f"{degree} does not divide dp_shard x cp = {fold}; use a divisor of it"
    experts = facts.values.get("model.num_experts")
    if isinstance(experts, int) and experts % degree:
        message = f"{degree} does not divide model.num_experts {experts}"
        yield "parallel.ep", f"{message}; use a divisor of it and of dp_shard x cp"


def _check_schedule(facts: Facts) -> Iterator[tuple[str, str]]:
    keys = ("pp", "schedule", "virtual_stages")
    pp, name, num_virtual = (facts.values[f"parallel.{key}"] for key in keys)
    names = (*NAMES, *auto_parallel.COMPILED)
    if name not in names and not is_file(name):
        near = " or ".join(nearest(name, names))
        hint = f"; did you mean {near}?" if near else ""
        expected = f"expected one of {', '.join(names)}, or the path of a .csv file{hint}"
        yield "parallel.schedule", f"{show(name)} is not a schedule; {expected}"
    elif is_file(name):
        yield from _check_schedule_file(facts, pp, name)
    elif pp > 1 and name in NAMES:
        for path, count in _microbatch_counts(facts):
            refusal = refuse(name, pp, count, num_virtual)
            if refusal:
                yield path, refusal
                return


def _check_schedule_file(facts: Facts, pp: int, name: str) -> Iterator[tuple[str, str]]:
    if pp == 1:
        yield "parallel.schedule", f"{show(name)} has no effect without stages; set parallel.pp or remove it"
        return
    try:
        found = read_csv(Path(name))
    except UserError as error:
        yield "parallel.schedule", str(error)
        return
    for path, count in _microbatch_counts(facts):
        refusal = refuse_use(found, pp, count)
        if refusal:
            yield path, refusal
            return


def _check_stage_layers(facts: Facts) -> Iterator[tuple[str, str]]:
    counts, chunks = facts.values["parallel.stage_layers"], _num_chunks(facts)
    if not counts or chunks is None:
        return
    if "parallel.stage_balance" in facts.layers:
        yield "parallel.stage_balance", "has no effect because parallel.stage_layers is set; remove one"
    refusal = refuse_counts(counts, facts.values["model.num_layers"], chunks)
    if refusal:
        yield "parallel.stage_layers", refusal


def _num_chunks(facts: Facts) -> int | None:
    """Stages of the whole pipeline; None when its schedule is wrong, which has a finding of its own."""
    pp, name = facts.values["parallel.pp"], facts.values["parallel.schedule"]
    if not is_file(name):
        return pp * auto_parallel.stages_per_rank(name, facts.values["parallel.virtual_stages"])
    try:
        return read_csv(Path(name)).num_stages
    except UserError:
        return None


def _microbatch_counts(facts: Facts) -> Iterator[tuple[str, int]]:
    """Microbatches that steps can have, and the key that says so."""
    yield "parallel.schedule", facts.values["train.accumulation_steps"]
    ramp = (f"train.rampup_{name}" for name in ("samples", "start", "increment"))
    if facts.known("train.global_batch_size", *ramp):
        start, step = facts.values["train.rampup_start"], facts.values["train.rampup_increment"]
        share = facts.values["train.global_batch_size"] // facts.values["train.accumulation_steps"]
        if facts.values["train.rampup_samples"] > 0 and start and step and start >= share:
            yield "train.rampup_start", start // share
            yield "train.rampup_increment", (start + step) // share


def _check_recomputed_stages(facts: Facts) -> Iterator[tuple[str, str]]:
    kind = facts.values["memory.recompute"]
    if facts.values["parallel.pp"] > 1 and kind in ("sqrt", "every_k", "budget"):
        yield "memory.recompute", f"{kind} is not possible with stages; use full or selective"


def _check_offloaded_weights(facts: Facts) -> Iterator[tuple[str, str]]:
    stage = facts.values["parallel.zero_stage"]
    if facts.values["offload.params"] == "cpu" and stage != 3:
        yield "offload.params", f"cpu needs sharded weights, zero_stage is {stage}; set parallel.zero_stage=3"


def _check_nvme_path(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["offload.optimizer"] == "nvme" and not facts.values["offload.nvme_path"]:
        yield "offload.nvme_path", "missing; offload.optimizer is nvme, so name a folder on a local disk"


def _check_budget(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["memory.recompute"] == "budget" and facts.values["memory.budget_gb"] is None:
        yield "memory.budget_gb", "missing; memory.recompute is budget, so say how many GB"


def _check_dtypes(facts: Facts) -> Iterator[tuple[str, str]]:
    names = {name: facts.values[f"precision.{name}"] for name in ("param", "compute", "reduce", "accumulate")}
    if names["compute"] == "fp32" != names["param"]:
        message = (
            f"fp32 is wider than param {names['param']}: widened weights gain no information; set compute to "
            f"{names['param']} or param to fp32"
        )
        yield "precision.compute", message
    halves = sorted(set(names.values()) - {"fp32"})
    if len(halves) > 1:
        users = ", ".join(f"{name} {dtype}" for name, dtype in names.items() if dtype in halves)
        yield "precision.policy", f"mixes {' and '.join(halves)} ({users}); use one of them and fp32"


def _check_loss_scale(facts: Facts) -> Iterator[tuple[str, str]]:
    names = ("param", "compute", "reduce", "accumulate")
    users = [name for name in names if facts.values[f"precision.{name}"] == "fp16"]
    if users and facts.values["precision.loss_scale"] == "none":
        message = f"none, but {', '.join(users)} is fp16: small gradients vanish; set it to dynamic"
        yield "precision.loss_scale", message


def _check_initial_scale(facts: Facts) -> Iterator[tuple[str, str]]:
    initial, least = facts.values["precision.initial_scale"], facts.values["precision.min_scale"]
    if facts.values["precision.loss_scale"] == "dynamic" and initial < least:
        yield "precision.initial_scale", f"{initial:g} is below min_scale {least:g}; raise it or lower that"


def _check_device_known(facts: Facts) -> Iterator[tuple[str, str]]:
    name = facts.values["hardware.device"]
    if name is not None and name not in hardware.device_names():
        hint = did_you_mean(name, hardware.device_names())
        yield "hardware.device", f"{show(name)} is not in the device catalogue{hint}"


def _check_device_target(facts: Facts) -> Iterator[tuple[str, str]]:
    name, target = facts.values["hardware.device"], facts.values["hardware.target"]
    if name is None or name not in hardware.device_names():
        return
    found = hardware.load_device(name).target
    if found != target:
        yield "hardware.device", f"{name} is a {found} device, but hardware.target is {target}; change one"


def _check_kernels(facts: Facts) -> Iterator[tuple[str, str]]:
    kernels, target = facts.values["hardware.kernels"], facts.values["hardware.target"]
    if kernels == ("custom" if target == "CPU" else "portable"):
        other = "native or portable" if target == "CPU" else "native or custom"
        yield "hardware.kernels", f"is {kernels}, but for hardware.target {target} there is {other}"


def _check_device_named(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.values["hardware.device"] is None:
        names = ", ".join(hardware.device_names())
        yield "hardware.device", f"not known, so utilisation is reported as n/a; name one of {names}"


_FILE_SOURCES = ("files", "jsonl", "megatron")
# Longest pattern after which a mixture repeats, see ms_zero.data.mixture.
_MIXTURE_PERIOD = 1 << 16
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# What the graph engine runs in this version, of the keys that it does not run in full.
_GRAPH_ENGINE = {
    "train.debug_collectives": (False,),
    "precision.reduce": ("fp32",),
    "precision.accumulate": ("fp32",),
    "precision.master": ("fp32",),
    "offload.params": ("none",),
    "hardware.target": ("CPU", "Ascend"),
}
# Without MindSpore's AutoParallel, which CPU does not have.
_GRAPH_UNCUT = {
    "parallel.pp": (1,),
    "parallel.tp": (1,),
    "parallel.cp": (1,),
    "parallel.micro_batch_interleave": (1,),
    "parallel.ep": (1,),
    "parallel.zero_stage": (0,),
    "memory.recompute": ("none",),
    "memory.activations": ("device",),
    "offload.optimizer": ("none",),
}
_GRAPH_ON_CPU = {**_GRAPH_UNCUT, "precision.compute": ("fp32", "fp16")}
# Of models with experts.
_GRAPH_EXPERTS = {"model.dropout": (0.0,), "data.reset_attention": (False,), "data.reset_positions": (False,)}
# With it.
_GRAPH_CUT = {
    "model.dropout": (0.0,),
    "train.eval_interval": (0,),
    "train.rampup_samples": (0,),
    "memory.recompute": ("none", "full", "every_k", "selective"),
    "memory.activations": ("device", "host"),
    "offload.optimizer": ("none", "cpu"),
    "hardware.kernels": ("native",),
}

_SECTION_RULES = (
    Rule(
        "MZ014",
        "A key that is set has an effect",
        "error",
        "Some keys belong to one choice, such as beta1 to adamw or files to source: files. Setting one "
        "together with another choice is a contradiction: it would be ignored.",
        "Remove the key, or make the choice that it belongs to.",
        check=_check_no_effect,
    ),
    Rule(
        "MZ015",
        "A key lost its effect by a later choice",
        "warning",
        "An included file, or the file below an override, sets a key of a choice that a later layer "
        "replaced. That is what overriding is for, so it is only mentioned.",
        "Nothing to do if the later choice is meant.",
        check=_check_lost_effect,
    ),
)
_MODEL_RULES = (
    Rule(
        "MZ020",
        "Heads divide the width",
        "error",
        "Attention splits hidden_size into num_heads equal parts. Llama-family models may choose head_dim "
        "freely.",
        "Use a number of heads that divides hidden_size, or set head_dim (llama).",
        ("model.family", "model.hidden_size", "model.num_heads"),
        _check_heads,
    ),
    Rule(
        "MZ021",
        "Key-value heads divide query heads",
        "error",
        "In grouped-query attention every key-value head serves the same number of query heads.",
        "Use a divisor of num_heads.",
        ("model.num_heads", "model.num_kv_heads"),
        _check_kv_heads,
    ),
    Rule(
        "MZ022",
        "The head width is even",
        "error",
        "Rotary position embedding rotates pairs of channels.",
        "Use an even head_dim.",
        ("model.head_dim",),
        _check_head_dim,
    ),
    Rule(
        "MZ023",
        "The embedding holds every token",
        "error",
        "A token id at or beyond vocab_size would read outside the embedding. A larger vocab_size is fine.",
        "Set model.vocab_size to auto or to at least the size of the tokenizer's vocabulary.",
        ("data.tokenizer", "data.tokenizer_file", "model.vocab_size"),
        _check_vocab,
    ),
    Rule(
        "MZ024",
        "Frequency bands of RoPE scaling are ordered",
        "error",
        "Llama-3 scaling blends between the two wavelengths; they must differ and be in order.",
        "Use low_freq_factor < high_freq_factor (Llama 3.1: 1 and 4).",
        ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"),
        _check_rope_scaling,
    ),
    Rule(
        "MZ025",
        "A token visits experts that there are",
        "error",
        "experts_per_token experts are chosen from groups_per_token of expert_groups equal groups of "
        "num_experts experts.",
        "Lower the number that the message names, or raise the one that it is compared with.",
        tuple(
            f"model.{name}"
            for name in ("num_experts", "experts_per_token", "expert_groups", "groups_per_token")
        ),
        _check_experts,
    ),
    Rule(
        "MZ026",
        "Dense layers and shared experts have a width",
        "error",
        "The first dense_layers layers have a gated MLP of width ffn_hidden_size, the others experts. Shared "
        "experts are one MLP that every token visits.",
        "Give ffn_hidden_size or shared_ffn_hidden_size, or remove what needs it.",
        tuple(
            f"model.{name}"
            for name in (
                "dense_layers",
                "num_layers",
                "ffn_hidden_size",
                "shared_gate",
                "shared_ffn_hidden_size",
            )
        ),
        _check_expert_layers,
    ),
    Rule(
        "MZ027",
        "Latent attention has heads of its own",
        "error",
        "Its queries and keys are nope_head_dim + rope_head_dim wide, there are as many keys as queries, and "
        "no biases or norms of heads.",
        "Remove num_kv_heads, head_dim, qkv_bias and qk_norm, or model.latent; use an even rope_head_dim.",
        ("model.latent.rope_head_dim",),
        _check_latent,
    ),
)
_BATCH_RULES = (
    Rule(
        "MZ030",
        "A sample fits the model",
        "error",
        "A sample of data.seq_len tokens needs as many positions.",
        "Lower data.seq_len or raise model.max_seq_len.",
        ("data.seq_len", "model.max_seq_len"),
        _check_seq_len,
    ),
    Rule(
        "MZ031",
        "A source of files names files",
        "error",
        "Without files there is nothing to train on.",
        "List files or glob patterns in data.files; for megatron the prefixes of .bin/.idx pairs.",
        ("data.source", "data.files"),
        _check_files,
    ),
    Rule(
        "MZ032",
        "Evaluation has held-out data",
        "error",
        "Evaluating on training data would not measure anything.",
        "Raise data.validation_fraction above 0, or set train.eval_interval to 0.",
        ("train.eval_interval", "data.validation_fraction"),
        _check_held_out,
    ),
    Rule(
        "MZ033",
        "The tokenizer file can be used",
        "error",
        "The size of the vocabulary and the end-of-text token are read from the tokenizer.json. The token is "
        "found by its usual names, such as <|endoftext|> or </s>, if exactly one of them is there.",
        "Correct data.tokenizer_file, or name the token that ends a document with data.eot_token.",
    ),
    Rule(
        "MZ034",
        "Only token ids do without a tokenizer",
        "error",
        "data.tokenizer: none reads megatron files as they are, when their tokenizer is not at hand. Text "
        "cannot be encoded without one, and nothing tells the size of the vocabulary.",
        "Name the tokenizer, or use megatron data and set model.vocab_size.",
        ("data.tokenizer", "data.source", "data.parts"),
        _check_no_tokenizer,
    ),
    Rule(
        "MZ035",
        "A mixture has parts, and each has its files",
        "error",
        "A mixture takes its samples from data.parts. Each part has a source, a weight and, if its source "
        "reads files, files.",
        "Write parts: [{source: jsonl, files: [a.jsonl], weight: 0.7}, {source: stdlib, weight: 0.3}].",
        ("data.source", "data.parts"),
        _check_parts,
    ),
    Rule(
        "MZ036",
        "Every part of a mixture is drawn from",
        "error",
        "The pattern of a mixture repeats after at most 65536 samples; a part with a smaller share than one "
        "of them would never be drawn.",
        "Raise the weight of the part, or leave the part out.",
        ("data.source", "data.parts"),
        _check_part_weights,
    ),
    Rule(
        "MZ040",
        "The batch algebra holds",
        "error",
        "global_batch_size = micro_batch_size x accumulation_steps x data-parallel degree, exactly. Nothing"
        " is rounded: a floored value would train with another batch than the one written down.",
        "Change the value that the message computes, or set one of the three to auto.",
    ),
    Rule(
        "MZ041",
        "Two of the three batch sizes are given",
        "error",
        "With the data-parallel degree, two of global_batch_size, micro_batch_size and accumulation_steps "
        "determine the third; one alone leaves a choice that affects memory and speed.",
        "Give two of them.",
    ),
    Rule(
        "MZ042",
        "The derived batch size is whole",
        "error",
        "The global batch must be a multiple of what all ranks process in one accumulation step.",
        "Set global_batch_size to one of the multiples that the message names, or change the other value.",
    ),
    Rule(
        "MZ043",
        "Intervals come round",
        "warning",
        "An interval longer than the run never triggers. The last checkpoint is written at the end anyway.",
        "Lower the interval, or ignore this for a short trial.",
        ("train.steps",),
        _check_intervals,
    ),
)
_RAMPUP_RULES = (
    Rule(
        "MZ044",
        "The batch ramp-up takes whole steps",
        "error",
        "The global batch grows from rampup_start by rampup_increment to global_batch_size. Every size on "
        "the way must be whole microbatches on every rank, and the last increment must end at the full size.",
        "Use multiples of micro_batch_size x dp for both, with an increment that divides "
        "global_batch_size - rampup_start.",
        (
            "train.rampup_samples",
            "train.rampup_start",
            "train.rampup_increment",
            "train.global_batch_size",
            "train.micro_batch_size",
            "parallel.dp_replicate",
            "parallel.dp_shard",
        ),
        _check_rampup,
    ),
)
_OPTIM_RULES = (
    Rule(
        "MZ050",
        "Warm-up ends before training does",
        "warning",
        "During warm-up the learning rate rises to its peak; if the run ends first, the schedule never "
        "starts. The default of 2000 steps suits long runs.",
        "Lower optim.warmup_steps, for a short run to a tenth of train.steps.",
        ("optim.warmup_steps", "train.steps"),
        _check_warmup,
    ),
    Rule(
        "MZ051",
        "wsd has a decay",
        "error",
        "Warm-up, stable, decay: the length of the last phase has no general default.",
        "Set optim.decay_steps, often a tenth of train.steps.",
        ("optim.schedule", "optim.decay_steps"),
        _check_decay_given,
    ),
    Rule(
        "MZ052",
        "Warm-up and decay fit into the run",
        "error",
        "The phases of the wsd schedule follow each other.",
        "Shorten optim.warmup_steps or optim.decay_steps, or train longer.",
        ("optim.schedule", "optim.decay_steps", "optim.warmup_steps", "train.steps"),
        _check_decay_fits,
    ),
    Rule(
        "MZ053",
        "The learning rate decays downwards",
        "error",
        "min_lr is where the decay from the peak lr ends; a higher end would be a second warm-up.",
        "Set optim.min_lr to at most optim.lr, usually a tenth of it.",
        ("optim.min_lr", "optim.lr"),
        _check_min_lr,
    ),
)
_PARALLEL_RULES = (
    Rule(
        "MZ060",
        "The mesh has as many places as there are workers",
        "error",
        "Every worker has exactly one place: pp x dp_replicate x dp_shard x cp x tp equals the number of "
        "workers.",
        "Start that many workers, or set parallel.dp_shard to auto.",
        tuple(f"parallel.{axis}" for axis in _AXES),
        _check_mesh,
    ),
    Rule(
        "MZ061",
        "The fixed degrees divide the number of workers",
        "error",
        "dp_shard: auto takes the workers that the other degrees leave, which must be a whole number.",
        "Start a multiple of the product that the message names, or lower a degree.",
    ),
    Rule(
        "MZ062",
        "Context parallelism has samples and heads that divide",
        "error",
        "Each context-parallel rank has the same number of tokens: the ring gives it two chunks of a sample, "
        "so that all have the same work, Ulysses one. Ulysses also shares the attention heads that a "
        "tensor-parallel rank has; with fewer key-value heads than ranks, several ranks get the same one.",
        "Set data.seq_len to a multiple of parallel.cp (ring: of 2 x cp), or change parallel.cp as the "
        "message says.",
        ("parallel.cp", "parallel.context", "parallel.tp", "data.seq_len", "model.num_heads"),
        _check_context_parallel,
    ),
    Rule(
        "MZ069",
        "The graph engine runs this",
        "unavailable",
        "engine: graph compiles training steps with MindSpore. This version does so on CPU for data "
        "parallelism with whole states, on Ascend also for what MindSpore's AutoParallel cuts. The eager "
        "engine runs everything else.",
        "Change the key as the message says, or set engine to eager.",
        ("engine.kind", "hardware.target"),
        _check_graph_engine,
    ),
    Rule(
        "MZ078",
        "AutoParallel does this combination",
        "unavailable",
        "MindSpore's AutoParallel cuts what engine: graph compiles for Ascend. Some combinations this "
        "version cannot do with it, and some it would do otherwise than the keys say.",
        "Change the key as the message says, or set engine to eager.",
        (
            "engine.kind",
            "hardware.target",
            "parallel.pp",
            "parallel.tp",
            "parallel.schedule",
            "parallel.stage_layers",
            "parallel.micro_batch_interleave",
            "parallel.zero_stage",
            "parallel.sync_each_microbatch",
            "parallel.reshard_after_forward",
            "parallel.sequence_parts",
            "parallel.dp_shard",
            "parallel.dp_replicate",
            "parallel.cp",
            "parallel.ep",
            "parallel.context",
            "data.seq_len",
            "data.reset_attention",
            "data.reset_positions",
            "train.accumulation_steps",
            "train.micro_batch_size",
            "memory.recompute",
            "offload.optimizer",
            "optim.kind",
            "precision.compute",
            "model.family",
            "model.hidden_size",
            "model.num_heads",
        ),
        _check_auto_parallel,
    ),
    Rule(
        "MZ086",
        "The engine has this order of microbatches",
        "unavailable",
        "zb-v, seqpipe and parts of a microbatch that take turns are orders of MindSpore's compiler, which "
        "engine: graph uses on Ascend. The eager engine of this version does not have them.",
        "Change the key as the message says, or set engine to graph and hardware.target to Ascend.",
        ("engine.kind", "parallel.pp", "parallel.schedule", "parallel.micro_batch_interleave"),
        _check_compiled_only,
    ),
    Rule(
        "MZ079",
        "The graph engine is watched on Ascend",
        "warning",
        "That its steps compile for Ascend, and which collectives they contain, is tested with MindSpore's "
        "front end. No NPU has run them.",
        "Compare the first losses with those of engine: eager.",
        ("engine.kind", "hardware.target"),
        _check_graph_untried,
    ),
    Rule(
        "MZ057",
        "The schedule is defined for these stages and microbatches",
        "error",
        "A pipeline works through the microbatches of a step in the order of a schedule. The interleaved one "
        "needs several stages a rank, and as many microbatches as a multiple of the ranks. One from a file "
        "has to compute every gradient once, must not deadlock, and is for one number of ranks and of "
        "microbatches.",
        "Change train.accumulation_steps, parallel.virtual_stages or the file as the message says, or use "
        "1f1b.",
        ("parallel.pp", "parallel.schedule", "parallel.virtual_stages", "train.accumulation_steps"),
        _check_schedule,
    ),
    Rule(
        "MZ058",
        "Every block is on one stage",
        "error",
        "A list of the blocks of the stages places each block of the model exactly once: it has as many "
        "numbers as the pipeline has stages, ranks x virtual stages, and they add up to the model's blocks.",
        "Correct parallel.stage_layers as the message says, or remove it to share blocks out by "
        "parallel.stage_balance.",
        (
            "parallel.pp",
            "parallel.schedule",
            "parallel.virtual_stages",
            "parallel.stage_layers",
            "parallel.stage_balance",
            "model.num_layers",
        ),
        _check_stage_layers,
    ),
    Rule(
        "MZ059",
        "Recompute stays within a stage",
        "error",
        "sqrt, every_k and budget choose among all blocks of the model, and a pipeline cuts between blocks.",
        "Set memory.recompute to full, selective or none.",
        ("parallel.pp", "memory.recompute"),
        _check_recomputed_stages,
    ),
    Rule(
        "MZ054",
        "Tensor parallelism fits the model",
        "error",
        "Tensor-parallel ranks share the attention heads evenly. With fewer key-value heads than ranks, "
        "several ranks hold the same one. Vocabulary and MLP are cut anywhere and need not divide.",
        "Set parallel.tp to a divisor of model.num_heads that divides model.num_kv_heads or is a multiple of "
        "it.",
        ("parallel.tp", "model.num_heads"),
        _check_tensor_parallel,
    ),
    Rule(
        "MZ045",
        "Expert parallelism has experts, and ranks to hold them",
        "error",
        "Expert parallelism shares the experts of a layer between ranks that see different data, as many on "
        "each. It takes no ranks of its own: they are among those of dp_shard x cp.",
        "Set parallel.ep to a common divisor of model.num_experts and dp_shard x cp, or to 1.",
        ("parallel.ep", "parallel.dp_shard", "parallel.cp", "model.family"),
        _check_expert_parallel,
    ),
    Rule(
        "MZ055",
        "Sequence parallelism has ranks, and a sequence that divides",
        "error",
        "Sequence parallelism cuts norms, dropout and residuals between the tensor-parallel ranks, each of "
        "which keeps the same number of the tokens that its context-parallel rank has.",
        "Set data.seq_len to a multiple of parallel.cp x tp, or parallel.sequence_parallel to false.",
        ("parallel.tp", "parallel.cp", "parallel.sequence_parallel", "data.seq_len"),
        _check_sequence_parallel,
    ),
    Rule(
        "MZ056",
        "Tensor parallelism stays inside a node",
        "warning",
        "Tensor-parallel ranks exchange activations in every layer. Within a node links are several times as "
        "fast as between nodes.",
        "Set parallel.tp to a divisor of the devices of a node, and start as many workers on each.",
        ("parallel.tp", "hardware.device"),
        _check_tensor_parallel_node,
    ),
    Rule(
        "MZ063",
        "Weights leave the device as shards",
        "error",
        "Stages 0 to 2 use the stored weights where they are. Stage 3 gathers shards before use, and these "
        "can wait in host memory.",
        "Set parallel.zero_stage to 3, or offload.params to none.",
        ("offload.params", "parallel.zero_stage"),
        _check_offloaded_weights,
    ),
    Rule(
        "MZ064",
        "Offload to files has a folder",
        "error",
        "Optimizer state is read and written in every step; the folder decides how fast that is.",
        "Set offload.nvme_path to a folder on a local disk with room for 12 bytes per owned parameter.",
        ("offload.optimizer", "offload.nvme_path"),
        _check_nvme_path,
    ),
)
_PRECISION_RULES = (
    Rule(
        "MZ068",
        "A budget says how much",
        "error",
        "Recompute by budget picks the least recompute that keeps activations within memory.budget_gb.",
        "Set memory.budget_gb, or choose another memory.recompute.",
        ("memory.recompute", "memory.budget_gb"),
        _check_budget,
    ),
    Rule(
        "MZ065",
        "The dtypes fit each other",
        "error",
        "Weights that are stored in 16 bits gain nothing by computing in fp32. The ranges of fp16 and bf16 "
        "differ: values that pass from one to the other overflow or vanish.",
        "Use one of fp16 and bf16, and fp32; compute at most as wide as param.",
        tuple(f"precision.{name}" for name in ("param", "compute", "reduce", "accumulate")),
        _check_dtypes,
    ),
    Rule(
        "MZ066",
        "fp16 has a loss scale",
        "warning",
        "Gradients below 6e-8 are zero in fp16. A factor on the loss keeps them, and is divided out again.",
        "Leave precision.loss_scale on auto, or set it to dynamic.",
        tuple(f"precision.{name}" for name in ("param", "compute", "reduce", "accumulate", "loss_scale")),
        _check_loss_scale,
    ),
    Rule(
        "MZ067",
        "The loss scale starts at or above its minimum",
        "error",
        "A dynamic scale moves between min_scale and 2^126.",
        "Raise precision.initial_scale or lower precision.min_scale.",
        ("precision.loss_scale", "precision.initial_scale", "precision.min_scale"),
        _check_initial_scale,
    ),
)
_HARDWARE_RULES = (
    Rule(
        "MZ070",
        "The device is in the catalogue",
        "error",
        "Peak rates come from configs/clusters, one file a device, each value with its source.",
        "Use a name from the catalogue, or add a file for the device.",
        ("hardware.device",),
        _check_device_known,
    ),
    Rule(
        "MZ071",
        "The device is of the chosen target",
        "error",
        "hardware.target decides which kernels and which collectives run; the device must be of that kind.",
        "Change hardware.target or hardware.device.",
        ("hardware.device", "hardware.target"),
        _check_device_target,
    ),
    Rule(
        "MZ072",
        "The device is named",
        "warning",
        "Model FLOPs utilisation is a share of the device's peak, which depends on its exact model.",
        "Set hardware.device to a name from the catalogue.",
        ("hardware.device",),
        _check_device_named,
    ),
    Rule(
        "MZ073",
        "The target has this kind of kernels",
        "error",
        "portable replaces the C++ library of the CPU; custom replaces MindSpore's operators of a device.",
        "Choose hardware.kernels=native, or portable on CPU, or custom on Ascend and GPU.",
        ("hardware.kernels", "hardware.target"),
        _check_kernels,
    ),
)

RULES: Final = (
    *_SECTION_RULES,
    *_MODEL_RULES,
    *_BATCH_RULES,
    *_RAMPUP_RULES,
    *_OPTIM_RULES,
    *_PARALLEL_RULES,
    *_PRECISION_RULES,
    *_HARDWARE_RULES,
)
"""All rules across keys, by id."""

EXPLANATIONS: Final[Mapping[str, Explanation]] = MappingProxyType(
    {entry.id: entry for entry in (*READING, *RULES)}
)
"""Every finding that loading can report, by id."""

"""Replaces every `auto` by the value that the other keys imply, and says in its origin how."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ms_zero.config.bind import Facts
from ms_zero.config.schema import AUTO
from ms_zero.config.tokenizers import VOCAB_SIZES, read_tokenizer_file
from ms_zero.errors import UserError
from ms_zero.mesh import AXES

_BATCH = ("train.global_batch_size", "train.micro_batch_size", "train.accumulation_steps")


class Problem(NamedTuple):
    """A violation before it gets its place: rule id, key, message."""

    rule: str
    path: str
    message: str


@dataclass(frozen=True)
class _Product:
    """The batch algebra with the values at hand: global = micro x accumulation x dp."""

    total: int | None
    micro: int | None
    accumulation: int | None
    dp: int


def derive(facts: Facts) -> list[Problem]:
    """Fill in all derived values; returns what cannot be derived. Those keys are left out of `facts`."""
    problems = [*_derive_dp_shard(facts), *_derive_batch(facts), *_derive_head_dim(facts)]
    problems += _derive_vocabulary(facts)
    _derive_sharding(facts)
    _derive_precision(facts)
    if facts.known("model.hidden_size"):
        _fill(facts, "model.ffn_hidden_size", 4 * facts.values["model.hidden_size"], "4 x model.hidden_size")
    if facts.known("model.num_heads"):
        _fill(facts, "model.num_kv_heads", facts.values["model.num_heads"], "model.num_heads")
    if facts.known("hardware.target"):
        on_cpu = facts.values["hardware.target"] == "CPU"
        how = "hardware.target is CPU" if on_cpu else "not known; name the device to see utilisation"
        _fill(facts, "hardware.device", "cpu" if on_cpu else None, how)
    for path in [path for path, value in facts.values.items() if value is AUTO]:
        del facts.values[path], facts.origins[path]
    return problems


def fitting_world_size(facts: Facts) -> int:
    """Return the smallest number of workers that the values so far allow: call it before `derive`.

    It is the product of the degrees. When dp_shard is auto and all three batch sizes are given, they tell it.
    """
    degrees = (facts.values.get(f"parallel.{axis}") for axis in AXES)
    workers = math.prod(degree for degree in degrees if isinstance(degree, int))
    if facts.values.get("parallel.dp_shard") is AUTO and facts.known("parallel.dp_replicate", *_BATCH):
        total, micro, accumulation = (facts.values[path] for path in _BATCH)
        shards, rest = divmod(total, micro * accumulation * facts.values["parallel.dp_replicate"])
        workers *= shards if rest == 0 else 1
    return workers


def _fill(facts: Facts, path: str, value: float | str | None, how: str) -> None:
    if facts.values.get(path) is AUTO:
        facts.values[path] = value
        facts.origins[path] = f"derived: {how}"


def _derive_sharding(facts: Facts) -> None:
    if facts.known("parallel.zero_stage"):
        stage = facts.values["parallel.zero_stage"]
        _fill(facts, "parallel.sync_each_microbatch", stage >= 2, f"zero_stage is {stage}")


def _derive_precision(facts: Facts) -> None:
    if not facts.known("precision.policy"):
        return
    policy = facts.values["precision.policy"]
    for name in ("param", "compute"):
        _fill(facts, f"precision.{name}", policy, f"policy {policy}")
    dtypes = [facts.values.get(f"precision.{name}") for name in ("param", "compute", "reduce", "accumulate")]
    scale, reason = ("dynamic", "fp16 is used") if "fp16" in dtypes else ("none", "no dtype is fp16")
    _fill(facts, "precision.loss_scale", scale, reason)
    if facts.known("precision.loss_scale", "precision.loss_scale_convention"):
        scale, convention = (facts.values[f"precision.loss_scale{end}"] for end in ("", "_convention"))
        how = f"convention {convention}" if scale == "dynamic" else f"loss_scale {scale}"
        is_large = (scale, convention) == ("dynamic", "megatron")
        _fill(facts, "precision.initial_scale", 2.0**32 if is_large else 2.0**16, how)
        _fill(facts, "precision.growth_interval", 2000 if convention == "torch" else 1000, how)


def _derive_vocabulary(facts: Facts) -> Iterator[Problem]:
    if not facts.known("data.tokenizer", "data.tokenizer_file", "data.eot_token"):
        return
    name, file = facts.values["data.tokenizer"], facts.values["data.tokenizer_file"]
    if name == "none":
        if facts.values.get("model.vocab_size") is AUTO:
            message = "cannot be derived because data.tokenizer is none; set it to the number of token ids"
            yield Problem("MZ034", "model.vocab_size", message)
    elif name in VOCAB_SIZES:
        facts.tokenizer_vocab = VOCAB_SIZES[name]
        _fill(facts, "model.vocab_size", VOCAB_SIZES[name], f"the {name} tokenizer")
    elif file is None:
        yield Problem("MZ033", "data.tokenizer_file", "missing; data.tokenizer is file, so name one")
    else:
        try:
            facts.tokenizer_vocab = read_tokenizer_file(file, facts.values["data.eot_token"]).vocab_size
        except UserError as error:
            yield Problem("MZ033", "data.tokenizer_file", str(error))
        else:
            _fill(facts, "model.vocab_size", facts.tokenizer_vocab, f"the highest id in {file}, plus 1")


def _derive_dp_shard(facts: Facts) -> Iterator[Problem]:
    others = ("parallel.pp", "parallel.dp_replicate", "parallel.cp", "parallel.tp")
    if facts.values.get("parallel.dp_shard") is not AUTO or not facts.known(*others):
        return
    product = 1
    for path in others:
        product *= facts.values[path]
    if facts.world_size % product:
        message = (
            f"pp x dp_replicate x cp x tp = {product} does not divide the number of workers, "
            f"{facts.world_size}; start a multiple of {product} workers or lower a degree"
        )
        yield Problem("MZ061", "parallel.dp_shard", message)
        return
    how = f"{facts.world_size} workers / (pp x dp_replicate x cp x tp = {product})"
    _fill(facts, "parallel.dp_shard", facts.world_size // product, how)


def _derive_head_dim(facts: Facts) -> Iterator[Problem]:
    parts = ("model.latent.nope_head_dim", "model.latent.rope_head_dim")
    if facts.known(*parts):
        width = sum(facts.values[path] for path in parts)
        _fill(facts, "model.head_dim", width, "latent.nope_head_dim + latent.rope_head_dim")
    if facts.values.get("model.head_dim") is not AUTO or not facts.known(
        "model.hidden_size", "model.num_heads"
    ):
        return
    width, heads = facts.values["model.hidden_size"], facts.values["model.num_heads"]
    if width % heads:
        message = f"{heads} does not divide hidden_size {width}; change one of them or set model.head_dim"
        yield Problem("MZ020", "model.num_heads", message)
        return
    _fill(facts, "model.head_dim", width // heads, "model.hidden_size / model.num_heads")


def _derive_batch(facts: Facts) -> Iterator[Problem]:
    """Solve global = micro x accumulation x dp for the value that is not given, or check all three."""
    if not facts.known("parallel.dp_replicate", "parallel.dp_shard") or not all(
        path in facts.values for path in _BATCH
    ):
        return
    dp = facts.values["parallel.dp_replicate"] * facts.values["parallel.dp_shard"]
    given = [None if facts.values[path] is AUTO else facts.values[path] for path in _BATCH]
    product = _Product(*given, dp=dp)
    if given.count(None) > 1:
        named = " and ".join(path for path, value in zip(_BATCH, given, strict=True) if value is not None)
        message = (
            f"two of global_batch_size, micro_batch_size and accumulation_steps are needed, "
            f"{'only ' + named.replace('train.', '') if named else 'none'} is given; the third follows"
        )
        yield Problem("MZ041", "train", message)
    elif product.total is None:
        total = product.micro * product.accumulation * dp
        how = f"micro_batch_size x accumulation_steps x dp = {product.micro} x {product.accumulation} x {dp}"
        _fill(facts, "train.global_batch_size", total, how)
    elif product.micro is None:
        yield from _divide(facts, product, "micro_batch_size", "accumulation_steps", product.accumulation)
    elif product.accumulation is None:
        yield from _divide(facts, product, "accumulation_steps", "micro_batch_size", product.micro)
    else:
        yield from _check_product(product)


def _divide(facts: Facts, product: _Product, target: str, other: str, value: int) -> Iterator[Problem]:
    """Set train.<target> to global / (value x dp), or say why that is no whole number."""
    share = value * product.dp
    if product.total % share == 0:
        how = f"global_batch_size / ({other} x dp) = {product.total} / ({value} x {product.dp})"
        _fill(facts, f"train.{target}", product.total // share, how)
        return
    below = product.total // share * share
    nearest = f"{below} or {below + share}" if below else str(share)
    message = (
        f"{product.total} is not a multiple of {other} x dp = {value} x {product.dp} = {share}, so "
        f"{target} is no whole number; set global_batch_size to {nearest}, or change {other}"
    )
    yield Problem("MZ042", "train.global_batch_size", message)


def _check_product(product: _Product) -> Iterator[Problem]:
    found = product.micro * product.accumulation * product.dp
    if found == product.total:
        return
    fixes = [f"global_batch_size={found}"]
    for name, other in (("micro_batch_size", product.accumulation), ("accumulation_steps", product.micro)):
        if product.total % (other * product.dp) == 0:
            fixes.append(f"{name}={product.total // (other * product.dp)}")
    message = (
        f"{product.total} is not micro_batch_size x accumulation_steps x dp = {product.micro} x "
        f"{product.accumulation} x {product.dp} = {found}; set "
        f"{' or '.join(fixes)}, or leave one of them auto"
    )
    yield Problem("MZ040", "train.global_batch_size", message)

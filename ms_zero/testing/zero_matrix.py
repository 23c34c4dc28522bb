"""The cases by which ZeRO is certified: what ``scripts/parity.py --matrix zero`` trains.

- The full product of stage, precision, accumulation and number of workers, each stage reducing gradients as
  it does by default; where that differs between stages, the other way too.
- A pairwise covering array over those axes and all others, see AXES: every pair of values that may occur
  together does. Beside each of its cases stands the plainest layout that has to give the same bits.
- fp16 training whose loss scale starts too high: it overflows, recovers, grows and overflows again.

The models are as small as still have several blocks, heads and uneven sizes (the width, 26, makes most
buckets no multiple of 3 or 4 elements). The optimizer is AdamW with eps 1e-4, so that rounding noise in a
gradient that is truly zero does not become an update, or SGD.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ms_zero.testing.covering import Axes, Row, covering_rows
from ms_zero.testing.parity import Case

PRODUCT: Axes = MappingProxyType(
    {
        "stage": (0, 1, 2, 3),
        "precision": ("fp32", "bf16", "fp16"),
        "accumulation": (1, 3),
        "world": (1, 2, 3, 4),
    }
)
AXES: Axes = MappingProxyType(
    {
        **PRODUCT,
        "family": ("gpt", "llama"),
        "optimizer": ("adamw", "sgd"),
        "clip": (True, False),
        "tied": (True, False),
        "frozen": (False, True),
        "dropout": (0.0, 0.1),
        "recompute": ("none", "full", "selective", "sqrt"),
        "offload": ("none", "cpu", "nvme"),
        "sync": (True, False),
        "replicas": (1, 2),
        "bucket_mb": (25.0, 0.01),
        "reshard": (True, False),
        "prefetch": (0, 2),
        "wrap": ("block", "size"),
        "weights": ("device", "host"),
    }
)
"""What a row of the covering array chooses. The last four belong to stage 3 and have their first value
elsewhere, as ``bucket_mb`` has in stage 3."""
_STAGE_3 = ("reshard", "prefetch", "wrap", "weights")
_PLAIN = MappingProxyType({axis: values[0] for axis, values in AXES.items()})

_DEPTH = 2
SIZES = (
    "model.hidden_size=26",
    "model.num_heads=2",
    "model.ffn_hidden_size=37",
    "model.max_seq_len=16",
    "data.seq_len=16",
    "train.global_batch_size=36",
    "train.eval_interval=0",
    "train.output_dir=unused",
    "optim.warmup_steps=3",
)
_FAMILIES = MappingProxyType(
    {
        "gpt": ("runs/quickstart", ()),
        "llama": ("runs/llama-tiny", ("model.num_kv_heads=1", "model.head_dim=10")),
    }
)
_OPTIMIZERS = MappingProxyType(
    {
        "adamw": ("optim.kind=adamw", "optim.eps=1e-4", "optim.lr=1e-3"),
        "sgd": ("optim.kind=sgd", "optim.lr=0.05"),
    }
)
# An embedding that is not trained leaves the first block with an input that needs no gradient.
FROZEN = ("*wte*", "*embed_tokens*", "*.0.mlp.*")
# Gradients overflow at about 2^19, so the scale falls three times or so; then it grows after few clean steps.
OVERFLOW = (
    "precision.initial_scale=1048576",
    "precision.growth_interval=3",
    "precision.hysteresis=2",
)


def allows(row: Row) -> bool:
    """Whether the values in a row, complete or not, may occur together."""
    stage = row.get("stage")
    if stage is not None and any(
        row.get(axis, _PLAIN[axis]) != _PLAIN[axis]
        for axis in (("bucket_mb",) if stage == 3 else _STAGE_3)
    ):
        return False  # the key has no effect
    # Two replicas need an even number of workers.
    return row.get("replicas") != 2 or row.get("world", 2) % 2 == 0


def zero_cases(quick: bool, scratch: Path) -> list[Case]:
    """The matrix; ``scratch`` is a folder for files of optimizer state."""
    rows = quick_rows() if quick else [*product_rows(), *with_partners(covering_rows(AXES, allows))]
    unique = list({tuple(row.values()): row for row in rows}.values())
    cases = [case_of(row, scratch) for row in unique]
    return [*cases, *overflow_cases(scratch, quick=quick)]


def product_rows() -> list[Row]:
    """Stages x precisions x accumulation x workers, and the way to reduce that is not a stage's own.

    Stages 0 to 2 have several buckets here.
    """
    rows = []
    for world in PRODUCT["world"]:
        for precision in PRODUCT["precision"]:
            for accumulation in PRODUCT["accumulation"]:
                for stage in PRODUCT["stage"]:
                    point = {"stage": stage, "precision": precision, "accumulation": accumulation}
                    bucket_mb = 25.0 if stage == 3 else 0.01
                    row = {**_PLAIN, **point, "world": world, "bucket_mb": bucket_mb, "sync": stage >= 2}
                    rows.append(row)
                    if accumulation > 1 and world > 1:
                        rows.append({**row, "sync": stage < 2})
    return rows


def with_partners(rows: list[Row]) -> list[Row]:
    """The rows, and before each the plainest one that has to give the same bits, unless it is there."""
    found: list[Row] = []
    groups: set[str] = set()
    for row in rows:
        group = group_of(row)
        if group not in groups:
            groups.add(group)
            found.append(partner_of(row))
        found.append(row)
    return found


def partner_of(row: Row) -> Row:
    """The plainest layout with the bits of a row: the lowest stage, one bucket, nothing offloaded."""
    kept = ("precision", "accumulation", "world", "family", "optimizer", "clip", "tied", "frozen", "dropout")
    plain = {**_PLAIN, **{axis: row[axis] for axis in kept}, "sync": row["sync"]}
    replicas = _replicas(row)
    stages = (1, 2) if replicas > 1 else (0, 1)
    depth = {"depth": _depth(row)} if _depth(row) != _DEPTH else {}
    choices = [{**plain, "stage": stage, "replicas": replicas, **depth} for stage in stages]
    return next(choice for choice in choices if choice != row)


def _replicas(row: Row) -> int:
    """Stage 0 treats all ranks alike."""
    return row["replicas"] if row["stage"] else 1


def _depth(row: Row) -> int:
    """Blocks of the model: segments of more than one need three."""
    return 3 if row["recompute"] == "sqrt" else row.get("depth", _DEPTH)


def group_of(row: Row) -> str:
    """What decides the bits of a row's result: rows with the same text have to agree."""
    synchronised = row["sync"] and row["accumulation"] > 1 and row["world"] > 1
    parts = [*_problem(row)[1], f"frozen {row['frozen']}", f"workers {row['world']}"]
    parts += [f"microbatches {row['accumulation']}", f"each reduced {synchronised}"]
    return "; ".join([*parts, row["family"], f"replicas {_replicas(row)}"])


def case_of(row: Row, scratch: Path, extra: tuple[str, ...] = (), *, suffix: str = "") -> Case:
    """The case of a row; ``extra`` are overrides of its problem, ``suffix`` names them."""
    base, problem = _problem(row)
    return Case(
        label_of(row) + suffix,
        row["world"],
        base,
        (*problem, *extra),
        _layout(row, scratch),
        frozen=FROZEN if row["frozen"] else (),
        group="; ".join([group_of(row), *extra]),
    )


def label_of(row: Row) -> str:
    """The name of a row: its place in the product, and what else is not as in the plain layout."""
    point = f"{row['family']} {row['precision']} {row['world']}w x{row['accumulation']} stage {row['stage']}"
    shown = [axis for axis in AXES if axis not in PRODUCT and axis != "family" and row[axis] != _PLAIN[axis]]
    words = {
        "optimizer": "sgd",
        "clip": "unclipped",
        "tied": "untied",
        "frozen": "frozen",
        "dropout": "dropout",
        "recompute": f"recompute {row['recompute']}",
        "offload": f"offload {row['offload']}",
        "sync": "reduced once",
        "replicas": "2 replicas",
        "bucket_mb": "small buckets",
        "reshard": "no reshard",
        "prefetch": f"prefetch {row['prefetch']}",
        "wrap": "wrap by size",
        "weights": "weights on host",
    }
    return ", ".join([point, *(words[axis] for axis in shown)])


def _problem(row: Mapping) -> tuple[str, tuple[str, ...]]:
    base, shape = _FAMILIES[row["family"]]
    overrides = (
        *SIZES,
        *shape,
        *_OPTIMIZERS[row["optimizer"]],
        f"model.num_layers={_depth(row)}",
        f"model.tie_embeddings={str(row['tied']).lower()}",
        f"model.dropout={row['dropout']}",
        f"optim.clip_norm={0.5 if row['clip'] else 0}",
    )
    # Not said for fp32, so that it shares its reference with the other precisions.
    if row["precision"] != "fp32":
        overrides = (*overrides, f"precision.policy={row['precision']}")
    return base, overrides


def _layout(row: Mapping, scratch: Path) -> tuple[str, ...]:
    stage = row["stage"]
    overrides = [
        f"train.accumulation_steps={row['accumulation']}",
        f"parallel.zero_stage={stage}",
        f"parallel.dp_replicate={row['replicas']}",
        f"parallel.sync_each_microbatch={str(row['sync']).lower()}",
        f"memory.recompute={row['recompute']}",
        f"offload.optimizer={row['offload']}",
    ]
    if row["offload"] == "nvme":
        overrides.append(f"offload.nvme_path={scratch / 'states'}")
    if stage == 3:
        overrides.append(f"parallel.reshard_after_forward={str(row['reshard']).lower()}")
        overrides.append(f"parallel.prefetch={row['prefetch']}")
        overrides.append(f"parallel.wrap={row['wrap']}")
        overrides += ["parallel.wrap_elements=1500"] if row["wrap"] == "size" else []
        overrides.append(f"offload.params={'cpu' if row['weights'] == 'host' else 'none'}")
    else:
        overrides.append(f"parallel.bucket_mb={row['bucket_mb']}")
    return tuple(overrides)


def overflow_cases(scratch: Path, *, quick: bool) -> list[Case]:
    """fp16 with a loss scale that starts too high: every stage, several layouts, both ways to count."""
    layouts = ((2, 1),) if quick else ((1, 3), (2, 1), (3, 3), (4, 1))
    conventions = ("deepspeed",) if quick else ("deepspeed", "megatron")
    stages = (1, 3) if quick else PRODUCT["stage"]
    cases = []
    for convention in conventions:
        extra = (*OVERFLOW, f"precision.loss_scale_convention={convention}")
        for world, accumulation in layouts:
            for stage in stages:
                point = {"stage": stage, "world": world, "accumulation": accumulation, "precision": "fp16"}
                row = {**_PLAIN, **point}
                cases.append(case_of(row, scratch, extra, suffix=f", overflows, {convention}"))
    return cases


def quick_rows() -> list[Row]:
    """Every precision in stages 0 and 3 on two workers, and a few rows of the covering array."""
    point = {"world": 2, "accumulation": 3}
    rows = [
        {**_PLAIN, **point, "precision": precision, "stage": stage}
        for precision in PRODUCT["precision"]
        for stage in (0, 3)
    ]
    covering = [row for row in covering_rows(AXES, allows) if row["world"] <= 2]
    return [*rows, *with_partners(covering[1:6])]

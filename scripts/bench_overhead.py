"""What the trainer costs on top of the model, and how fast the model is beside plain PyTorch.

    python scripts/bench_overhead.py [--quick] [--json [PATH]]

One worker trains a GPT of 17.0 million parameters (6 layers, width 384, vocabulary 8192) on batches of
4 x 256 tokens in fp32. Compared in one process, step by step in turn:

- ours: ``Trainer.step``, as ``ms-zero train`` runs it;
- baseline: a minimal loop a MindSpore user writes, with the same model and work: ``value_and_grad``, gradient
  norm, finite check, clipping, decoupled decay and ``ops.Adam`` for each parameter.

``overhead_ratio`` is the median of ours over the baseline's time, minus one. The comparison with torch runs
in processes of their own, torch before and after ours; without torch those figures are left out. This process
itself computes nothing: idle threads of a framework would take time from the others.
"""

import argparse
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SHAPE = {"vocab_size": 8192, "hidden_size": 384, "num_layers": 6, "num_heads": 6, "ffn_hidden_size": 1536}
QUICK_SHAPE = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 256}
SEQ_LEN, BATCH = 256, 4
LR, BETA1, BETA2, EPS, DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0


def token_batches(vocab_size: int) -> np.ndarray:
    """int32 [64, T + 1] of random tokens: 16 batches that are used over and over."""
    return np.random.default_rng(1).integers(0, vocab_size, (64, SEQ_LEN + 1)).astype(np.int32)


class RandomTokens:
    """The batches as a dataset of the loader."""

    seq_len = SEQ_LEN

    def __init__(self, vocab_size: int) -> None:
        self.tokens = token_batches(vocab_size)

    def __len__(self) -> int:
        return len(self.tokens)

    def sample(self, index: int) -> object:
        """One row as inputs and labels."""
        from ms_zero.data import Sample

        return Sample(self.tokens[index, :-1], self.tokens[index, 1:])


def build_model(shape: dict[str, int]) -> object:
    """The GPT of the benchmark with an untied head."""
    from ms_zero.models import GPT

    return GPT(**shape, max_seq_len=SEQ_LEN, norm_eps=1e-5, init_std=0.02, tie_embeddings=False)


def our_step(shape: dict[str, int]) -> Callable[[], object]:
    """A trainer on one worker, built from a configuration."""
    from ms_zero.comm import ProcessMesh, local
    from ms_zero.config import load_config, mesh_of
    from ms_zero.data import Loader
    from ms_zero.recipes.build import DATA_AXES, build_engine
    from ms_zero.runner import build_batch_schedule, build_schedule
    from ms_zero.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(run_config(shape)), encoding="utf-8")  # JSON is YAML
        config = load_config(path, [], 1).config
    comm = local()
    pmesh = ProcessMesh(mesh_of(config, 1), comm)
    return Trainer(
        build_engine(config, pmesh),
        Loader(RandomTokens(shape["vocab_size"]), seed=1, fingerprint="random"),
        build_schedule(config),
        comm=comm,
        group=pmesh.group(*DATA_AXES),
        batch_size=build_batch_schedule(config.train),
        micro_batch_size=BATCH,
        clip_norm=CLIP,
    ).step


def run_config(shape: dict[str, int]) -> dict[str, object]:
    """The run as a user would write it."""
    return {
        "model": {"family": "gpt", **shape, "max_seq_len": SEQ_LEN, "tie_embeddings": False},
        "data": {"source": "stdlib", "seq_len": SEQ_LEN},
        "train": {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": BATCH, "output_dir": "unused"},
        "optim": {
            "lr": LR,
            "beta1": BETA1,
            "beta2": BETA2,
            "eps": EPS,
            "weight_decay": DECAY,
            "clip_norm": CLIP,
            "schedule": "constant",
            "warmup_steps": 0,
        },
    }


def baseline_step(shape: dict[str, int]) -> Callable[[], object]:
    """The hand-written loop."""
    import mindspore as ms
    from mindspore import Tensor, ops

    from ms_zero.kernels import CrossEntropySum
    from ms_zero.models import decay_names, initialise

    model = build_model(shape)
    initialise(model, 1)
    decayed = decay_names(model)
    params = [param for _, param in model.parameters_and_names()]
    decays = [DECAY if name in decayed else 0.0 for name, _ in model.parameters_and_names()]
    moments = [[Tensor(np.zeros(p.shape, np.float32)) for _ in range(2)] for p in params]
    loss_sum, adam, descend = CrossEntropySum(), ops.Adam(), ops.ApplyGradientDescent()
    square, total = ops.Square(), ops.ReduceSum()
    tokens = token_batches(shape["vocab_size"])

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(ids)
        return loss_sum(logits.reshape((-1, logits.shape[-1])), labels) / labels.size

    value_and_grad = ms.value_and_grad(loss, None, params)
    steps = 0

    def step() -> float:
        nonlocal steps
        rows = np.arange(steps * BATCH, (steps + 1) * BATCH) % len(tokens)
        steps += 1
        ids, labels = tokens[rows, :-1], tokens[rows, 1:]
        value, grads = value_and_grad(Tensor(ids), Tensor(np.ascontiguousarray(labels).reshape(-1)))
        norm = math.sqrt(sum(float(total(square(grad)).asnumpy()) for grad in grads))
        if math.isfinite(norm):
            scale = min(1.0, CLIP / norm)
            root = math.sqrt(1 - BETA2**steps)
            rate, eps = LR * root / (1 - BETA1**steps), EPS * root
            for param, (mean, mean_sq), grad, decay in zip(params, moments, grads, decays):
                if decay:
                    descend(param, LR * decay, param)
                adam(param, mean, mean_sq, 0.0, 0.0, rate, BETA1, BETA2, eps, grad * scale)
        return float(value.asnumpy())

    return step


def torch_gpt(shape: dict[str, int], seq_len: int) -> object:
    """The same model in plain PyTorch; ``blocks`` holds its blocks."""
    import torch
    from torch import nn

    width, heads, inner = shape["hidden_size"], shape["num_heads"], shape["ffn_hidden_size"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc, self.out = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, length, _ = x.shape
            parts = self.qkv(self.ln_1(x)).view(rows, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
            return x + self.out(nn.functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(shape["vocab_size"], width)
            self.position = nn.Embedding(seq_len, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(shape["num_layers"])))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape["vocab_size"], bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.token(ids) + self.position.weight
            return self.head(self.norm(self.blocks(x)))

    return Model()


def torch_step(shape: dict[str, int]) -> Callable[[], object]:
    """The same work in plain PyTorch."""
    import torch
    from torch import nn

    model = torch_gpt(shape, SEQ_LEN)
    betas = (BETA1, BETA2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=betas, eps=EPS, weight_decay=DECAY)
    tokens = torch.from_numpy(token_batches(shape["vocab_size"])).long()
    steps = 0

    def step() -> float:
        nonlocal steps
        rows = torch.arange(steps * BATCH, (steps + 1) * BATCH) % len(tokens)
        steps += 1
        batch = tokens[rows]
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), CLIP)):
            optimizer.step()
        return loss.item()

    return step


def seconds(step: Callable[[], object]) -> float:
    """Wall time of one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def alternate(shape: dict[str, int], steps: int) -> list[tuple[float, float]]:
    """Seconds of our step and of the baseline's, in turn; the order changes every time."""
    from ms_zero import _compat

    _compat.launch_blocking()
    ours, baseline = our_step(shape), baseline_step(shape)
    for _ in range(3):
        ours()
        baseline()
    pairs = []
    for number in range(steps):
        if number % 2:
            theirs = seconds(baseline)
            pairs.append((seconds(ours), theirs))
        else:
            mine = seconds(ours)
            pairs.append((mine, seconds(baseline)))
    return pairs


def alone(kind: str, shape: dict[str, int], steps: int) -> object:
    """What a process of its own measures: the pairs, or median tokens per second and peak resident bytes."""
    if kind == "pairs":
        return alternate(shape, steps)
    if kind == "ms_zero":
        from ms_zero import _compat

        _compat.launch_blocking()
    step = {"ms_zero": our_step, "torch": torch_step}[kind](shape)
    for _ in range(3):
        step()
    median = statistics.median(seconds(step) for _ in range(steps))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens_per_second": BATCH * SEQ_LEN / median, "peak_rss_bytes": peak}


def in_process(kind: str, quick: bool, steps: int) -> object:
    """The figures of :func:`alone` from a new process."""
    command = [sys.executable, __file__, "--alone", kind, "--steps", str(steps)] + ["--quick"] * quick
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(shown.splitlines()[-1])


def measure(quick: bool, steps: int) -> dict[str, dict | list]:
    """All figures as metrics and cases."""
    pairs = in_process("pairs", quick, steps)
    has_torch = importlib.util.find_spec("torch") is not None
    torch_runs = [in_process("torch", quick, steps)] if has_torch else []
    ours = in_process("ms_zero", quick, steps)
    metrics = {
        "overhead_ratio": statistics.median(mine / theirs for mine, theirs in pairs) - 1,
        "tokens_per_second": ours["tokens_per_second"],
        "peak_rss_bytes": ours["peak_rss_bytes"],
    }
    if has_torch:
        torch_runs.append(in_process("torch", quick, steps))
        torch_rate = statistics.mean(run["tokens_per_second"] for run in torch_runs)
        metrics["torch_tokens_per_second"] = torch_rate
        metrics["torch_ratio"] = ours["tokens_per_second"] / torch_rate
    cases = [{"ours_seconds": mine, "baseline_seconds": theirs} for mine, theirs in pairs]
    return {"metrics": metrics, "cases": cases}


def main() -> int:
    """Measure and print; returns the exit status."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--steps", type=int, default=0, help="measured steps (default 24, quick: 4)")
    add_json_option(parser)
    parser.add_argument("--alone", choices=("pairs", "ms_zero", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    steps = args.steps or (4 if args.quick else 24)
    if args.alone:
        print(json.dumps(alone(args.alone, QUICK_SHAPE if args.quick else SHAPE, steps)))
        return 0
    found = measure(args.quick, steps)
    for name, value in found["metrics"].items():
        print(f"{name:26} {value:.4g}")
    write_figures(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Public training results that the time model is held against, with the layouts they were measured on."""

from __future__ import annotations

from dataclasses import dataclass

from ms_zero.hardware import load_device
from ms_zero.plan.activations import MINDFORMERS_KEPT
from ms_zero.plan.layout import MINDFORMERS, Layout
from ms_zero.plan.memory import MemoryModel
from ms_zero.plan.models import load_model
from ms_zero.plan.time import TimeModel

ASCEND_CLUSTER = "ascend-910b"
"""The cards of all rows are Atlas A2 of unstated bin; this catalogue entry says which one is assumed."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of the MindFormers r1.3.0 model cards (bf16).

    Args:
        name: model as the card calls it.
        model: preset of ``configs/models``.
        layout: how it was trained.
        cap: configured memory limit in bytes: an upper bound of what it used (MindSpore reads GB as GiB).
        tokens_per_second_per_device: measured.

    """

    name: str
    model: str
    layout: Layout
    cap: float
    tokens_per_second_per_device: float


def _card(seq_len: int, **layout: object) -> Layout:
    return Layout(seq_len=seq_len, hsdp_level=1, precision=MINDFORMERS, **layout)


ASCEND_ROWS = (
    Published(
        name="Llama2-7B",
        model="llama2-7b",
        layout=_card(4096, dp_shard=8, microbatches=8),
        cap=59 * 2**30,
        tokens_per_second_per_device=4160,
    ),
    Published(
        name="Llama2-13B",
        model="llama2-13b",
        layout=_card(4096, dp_shard=8, micro_batch_size=4, recompute="full"),
        cap=59 * 2**30,
        tokens_per_second_per_device=1691,
    ),
    Published(
        name="Llama2-70B",
        model="llama2-70b",
        layout=_card(
            4096,
            tp=4,
            pp=8,
            microbatches=256,
            sequence_parallel=True,
            schedule="interleaved",
            virtual_stages=2,
            recompute="selective",
        ),
        cap=53 * 2**30,
        tokens_per_second_per_device=337,
    ),
    Published(
        name="Llama3-8B",
        model="llama3-8b",
        layout=_card(8192, dp_shard=8, recompute="full"),
        cap=58 * 2**30,
        tokens_per_second_per_device=2581,
    ),
    Published(
        name="DeepSeek-V2-236B",
        model="deepseek-v2",
        layout=_card(4096, dp_shard=4, tp=8, pp=2, ep=4, microbatches=20, recompute="full"),
        cap=59 * 2**30,
        tokens_per_second_per_device=36,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A published row and what the models say about it.

    Args:
        row: the published figures.
        tokens_per_second_per_device: predicted, with the pipeline run event by event.
        memory: predicted bytes of the fullest device.

    """

    row: Published
    tokens_per_second_per_device: float
    memory: float

    @property
    def error(self) -> float:
        """Predicted over measured throughput, less 1."""
        return self.tokens_per_second_per_device / self.row.tokens_per_second_per_device - 1


def predict(row: Published) -> Predicted:
    """Predict one row with the published constants."""
    shape = load_model(row.model)
    time = TimeModel(shape, load_device(ASCEND_CLUSTER)).simulate(row.layout)
    memory = MemoryModel(shape, kernels=MINDFORMERS_KEPT).peak(row.layout)
    return Predicted(
        row=row, tokens_per_second_per_device=time.tokens_per_second_per_device, memory=memory
    )

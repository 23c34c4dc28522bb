"""Run configs for named sizes of models."""

from collections.abc import Sequence

from ms_zero.config import RunConfig, load_config
from ms_zero.resources import find_preset


def setup_training(name: str, workers: int | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the whole run config of a named size, such as `gpt3-175b`.

    Names are the files of `configs/runs`: `NAME` is the layout of the founding table, `NAME-planned` the one
    that the planner recommends on Ascend 910B instead.

    Args:
        name: Name of a run preset.
        workers: Number of workers; the data-parallel degree follows from it. None: the number that the preset
            was made for.
        overrides: `section.key=value` items, applied last.

    Returns:
        The config. What this version cannot run of it is refused where it would be run, with the reason; see
        `ms_zero.config.require_runnable`.

    Raises:
        UserError: There is no such preset (the nearest names are told), or the overrides do not fit.

    """
    file = find_preset("runs", name)
    follow = [] if workers is None else ["parallel.dp_shard=auto"]
    return load_config(file, [*follow, *overrides], workers, to_run=False).config

"""Compile for a rank of an Ascend cluster on a machine without one. All of it is private MindSpore API.

Checked on MindSpore 2.10.0, and refused on any other version: see :func:`unavailable_reason`. What runs is
MindSpore's own front end up to the last of its passes, where all communication has been inserted. There are
no kernels, no memory and no numbers; nothing here is meant for training.

A process that called :func:`enable` believes to have devices: it must not run an operation, and ends after
its compilation.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import types
from pathlib import Path
from typing import Any

import mindspore
from mindspore import context, nn

try:
    from mindspore.communication import _comm_helper
    from mindspore.graph.api import _cell_graph_executor
except ImportError:  # another version: unavailable_reason says so
    _comm_helper = _cell_graph_executor = None

CHECKED_VERSION = "2.10.0"

_WORLD = "hccl_world_group"
_SETTER = "_ZN9mindspore9MsContext6seter_E"
_HASH_SEED = 0xC70F6907  # of std::hash in libstdc++


def unavailable_reason() -> str | None:
    """Why this MindSpore cannot be used here; None: it can."""
    if mindspore.__version__ != CHECKED_VERSION:
        return f"the hooks into MindSpore's front end are known for {CHECKED_VERSION}, not for " + (
            mindspore.__version__
        )
    try:
        _setter()
        _hash_function()
    except (OSError, ValueError, AttributeError) as error:
        return f"a hook into MindSpore's front end is not there: {error}"
    missing = [name for name in ("hccl", "_HCCL_TEST_AVAILABLE") if not hasattr(_comm_helper, name)]
    if "_HCCL_TEST_AVAILABLE" in missing or not hasattr(_cell_graph_executor, "compile"):
        return "a hook into MindSpore's front end is not there: _comm_helper or _cell_graph_executor changed"
    return None


def enable(rank: int, size: int, local_size: int) -> None:
    """Make this process rank `rank` of `size`, with `local_size` devices a machine, in graph mode on Ascend.

    Checked on 2.10.0: ``MsContext::seter_`` (the function that loads a device's plugin) is left out while the
    target is set; ``communication._comm_helper`` asks a module ``hccl_test`` about ranks when there is no
    HCCL.
    """
    os.environ["RANK_ID"], os.environ["RANK_SIZE"] = str(rank), str(size)
    setter = _setter()
    saved, setter.value = setter.value, None
    try:
        context._context()._context_handle.set_param(context.ms_ctx_param.device_target, "Ascend")
    finally:
        setter.value = saved
    api = _communication(rank, _Groups(rank, size), local_size)
    package, manage = types.ModuleType("hccl_test"), types.ModuleType("hccl_test.manage")
    package.manage, manage.api = manage, api
    sys.modules |= {"hccl_test": package, "hccl_test.manage": manage, "hccl_test.manage.api": api}
    _comm_helper._HCCL_TEST_AVAILABLE, _comm_helper.hccl = True, api
    world = _comm_helper.GlobalComm
    world.BACKEND, world.WORLD_COMM_GROUP, world.INITED = "hccl", _WORLD, True
    context.set_context(mode=context.GRAPH_MODE)


def compile_front_end(cell: nn.Cell, inputs: tuple[Any, ...], folder: Path) -> str:
    """Run the front end and return the text of the graph after its last pass; `folder` gets MindSpore's
    dumps.

    Checked on 2.10.0: ``MS_DEV_PRECOMPILE_ONLY``, ``MS_DEV_SAVE_GRAPHS``, ``MS_DEV_DUMP_IR_PASSES``,
    ``_cell_graph_executor.compile``.
    """
    os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"
    os.environ["MS_DEV_SAVE_GRAPHS"] = "2"
    os.environ["MS_DEV_DUMP_IR_PASSES"] = "validate"
    os.environ["MS_DEV_SAVE_GRAPHS_PATH"] = str(folder)
    _cell_graph_executor.compile(cell, *inputs, phase="train")
    found = sorted(folder.rglob("*_validate_*.ir"))
    assert found, f"no graph was written to {folder}"
    return found[-1].read_text()


def automatic_group_name(ranks: tuple[int, ...]) -> str:
    """The name that the front end gives to the group of these ranks.

    Checked on 2.10.0: their number and ``std::hash`` of "r0-r1-...".
    """
    text = "-".join(map(str, ranks)).encode()
    return f"{len(ranks)}-{_hash_function()(text, len(text), _HASH_SEED)}"


class _Groups(dict):
    """Name -> ranks. A name that nobody registered is one that the front end made up."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__({_WORLD: list(range(size))})
        self.rank, self.size = rank, size

    def __missing__(self, name: str) -> list[int]:
        length = int(name.split("-")[0])
        for ranks in _likely_groups(self.size, length, self.rank):
            if automatic_group_name(ranks) == name:
                self[name] = list(ranks)
                return self[name]
        raise KeyError(name)


def _likely_groups(size: int, length: int, rank: int) -> Any:
    """Groups of `length` ranks with `rank` in them: evenly spaced ones first, then all."""
    for stride in range(1, size):
        for first in range(rank % stride, rank + 1, stride):
            ranks = tuple(range(first, first + stride * length, stride))
            if rank in ranks and ranks[-1] < size:
                yield ranks
    for ranks in itertools.combinations(range(size), length):
        if rank in ranks:
            yield ranks


def _communication(rank: int, groups: _Groups, local_size: int) -> types.ModuleType:
    """What MindSpore asks a communication library about ranks."""
    api = types.ModuleType("hccl_test.manage.api")
    api.create_group = lambda group, _, ranks: groups.__setitem__(group, list(ranks))
    api.destroy_group = lambda group: groups.pop(group, None)
    api.get_rank_id = lambda group=_WORLD: groups[group].index(rank)
    api.get_rank_size = lambda group=_WORLD: len(groups[group])
    api.get_local_rank_id = lambda group=_WORLD: rank % local_size
    api.get_local_rank_size = lambda group=_WORLD: min(groups.size, local_size)
    api.get_world_rank_from_group_rank = lambda group, member: groups[group][member]
    api.get_group_rank_from_world_rank = lambda world_rank, group: groups[group].index(world_rank)
    return api


def _setter() -> ctypes.c_void_p:
    library = Path(mindspore.__file__).parent / "lib" / "libmindspore_core.so"
    return ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), _SETTER)


def _hash_function() -> Any:
    function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return function

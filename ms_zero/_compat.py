"""The only home of private MindSpore API. Every item below was checked on MindSpore 2.10.0.

When MindSpore is upgraded, run ``tests/test_compat.py`` first: it exercises each item on its own.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import _c_expression as _c
from mindspore.common._grad_function import _Function
from mindspore.common.dtype import _dtype_to_nptype
from mindspore.common.initializer import initializer
from mindspore.communication import GlobalComm
from mindspore.communication.management import _init_with_store
from mindspore.graph.api import _no_grad, _pynative_executor
from mindspore.mint import distributed as _dist
from mindspore.mint.distributed import distributed as _dist_module

#: Base class of a custom differentiable function: static ``forward(ctx, ...)`` and ``backward(ctx, *grads)``.
#: PyNative only. Checked on 2.10.0: ``mindspore.common._grad_function._Function``.
function_class = _Function

#: Context manager: operations inside are not recorded. Checked on 2.10.0: ``mindspore.graph.api._no_grad``.
no_grad = _no_grad


_TAPED: ContextVar[bool] = ContextVar("ms_zero.tape", default=False)


def is_taped() -> bool:
    """Whether a :func:`tape` is what records, if anything does."""
    return _TAPED.get()


@contextmanager
def tape() -> Iterator[None]:
    """Record operations for :func:`backward`.

    Several recorded graphs may be alive at once (a pipeline runs forward of several microbatches first).
    Checked on 2.10.0: the grad flags of ``_pynative_executor``.
    """
    grad_flag, enable_grad = _pynative_executor.grad_flag(), _pynative_executor.enable_grad()
    _pynative_executor.set_grad_flag(True)
    _pynative_executor.set_enable_grad(True)
    token = _TAPED.set(True)
    try:
        yield
    finally:
        _TAPED.reset(token)
        _pynative_executor.set_grad_flag(grad_flag)
        _pynative_executor.set_enable_grad(enable_grad)


def is_recording() -> bool:
    """Whether operations are being recorded, by :func:`tape` or by the public ``value_and_grad``.

    Checked on 2.10.0: ``_pynative_executor.grad_flag`` and ``enable_grad``.
    """
    return _pynative_executor.grad_flag() and _pynative_executor.enable_grad()


def backward(
    outputs: Tensor | Sequence[Tensor],
    grads: Tensor | Sequence[Tensor] | None = None,
    inputs: Sequence[Tensor] = (),
    keep_graph: bool = False,
) -> None:
    """Back-propagate from `outputs` and add to ``._grad`` of the leaves.

    Leaves are Parameters and tensors with ``requires_grad``; with `inputs`, only those. `grads` are the
    gradients of the outputs (None: ones, for scalars). The recorded graph is freed unless `keep_graph`.
    Accumulation into ``._grad`` is out of place. May be called inside ``function_class.backward``.
    Checked on 2.10.0: ``mindspore._c_expression.run_backward``.
    """
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if grads is not None:
        grads = tuple(grads) if isinstance(grads, (tuple, list)) else (grads,)
    _c.run_backward(tuple(outputs), grads, keep_graph, False, tuple(inputs), True, accumulate_grad=True)


def clear_grads(params: Iterable[Parameter]) -> None:
    """Drop what :func:`backward` accumulated on parameters. Checked on 2.10.0: ``Tensor._grad``."""
    for param in params:
        param._grad = None


def gradient(tensor: Tensor) -> Tensor | None:
    """What :func:`backward` accumulated on a leaf. Checked on 2.10.0: ``Tensor._grad``."""
    return tensor._grad


def needs_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf that wants a gradient or depends on one.

    Checked on 2.10.0: ``Tensor._requires_grad``.
    """
    return tensor._requires_grad


def leaf(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """A new leaf on the storage of `tensor`, outside of its graph. Checked on 2.10.0: ``Tensor.data``."""
    found = tensor.data
    if requires_grad:
        found.requires_grad_(True)
    return found


def has_backward_hooks(cell: nn.Cell) -> bool:
    """Whether the backward of a cell calls hooks registered on it.

    Checked on 2.10.0: ``Cell._backward_hook`` and ``Cell._backward_pre_hook``.
    """
    return bool(cell._backward_hook) or bool(cell._backward_pre_hook)


@contextmanager
def nested_backward(around: Iterable[nn.Cell]) -> Iterator[None]:
    """Wrap a :func:`backward` inside ``function_class.backward`` when cells may have backward hooks.

    The end of any backward calls the backward hooks that still wait for the gradient of their cell's input,
    as if it would never come; at the end of a nested one it is on its way. `around`: the cells whose backward
    the nested one is a part of. Their hooks stay waiting. Those whose cell has no input that needs a gradient
    are called at the end of the outer backward, as without nesting.
    Checked on 2.10.0: ``Cell._cell_backward_hook``, attributes ``grad_output`` (set while it waits) and
    ``hook_dict``; ``_pynative_executor.queue_backward_final_callback``.
    """
    hooks = [cell._cell_backward_hook for cell in around]
    waiting = [(hook, hook.grad_output, hook.hook_dict) for hook in hooks if hook and hook.grad_output]
    for hook, _, _ in waiting:
        hook.hook_dict = dict
    try:
        yield
    finally:
        for hook, grad_output, registered in waiting:
            hook.grad_output, hook.hook_dict = grad_output, registered
    if waiting:
        _pynative_executor.queue_backward_final_callback(lambda: _end_hooks([hook for hook, _, _ in waiting]))


def _end_hooks(hooks: Sequence) -> None:
    """Call the backward hooks that got no gradient of their cell's input."""
    for hook in hooks:
        grad_output, hook.grad_output = hook.grad_output, None
        if grad_output is not None:
            for registered in list((hook.hook_dict() or {}).values()):
                registered(hook.cell, (None,), grad_output)


def reset_backward_hooks(cells: Iterable[nn.Cell]) -> None:
    """Forget that an exception broke off a backward.

    A cell's hook is called for the gradient of its output and then for that of its input, and tells them
    apart by counting; after an exception between the two it would take the next output for an input.
    Checked on 2.10.0: ``Cell._cell_backward_hook``, attribute ``grad_output``.
    """
    for cell in cells:
        if cell._cell_backward_hook is not None:
            cell._cell_backward_hook.grad_output = None


def host_view(tensor: Tensor) -> np.ndarray:
    """The storage of a CPU tensor as a writable array that shares it; same shape.

    Only with blocking launch (:func:`launch_blocking`), so that no queued operation still reads or writes it.
    Checked on 2.10.0: ``Tensor.asnumpy`` shares the storage on CPU.
    """
    return tensor.asnumpy()


def finish_queued() -> None:
    """Return when every operation that was called has run, so that storages may be read and written directly.

    Costs under a microsecond when nothing is queued, as with :func:`launch_blocking`.
    Checked on 2.10.0: ``_pynative_executor.sync``.
    """
    _pynative_executor.sync()


def numpy_dtype(dtype: mindspore.Type) -> np.dtype:
    """The numpy dtype of a MindSpore dtype; the public function warns on every call.

    Checked on 2.10.0: ``mindspore.common.dtype._dtype_to_nptype``.
    """
    return np.dtype(_dtype_to_nptype(dtype))


def launch_blocking() -> None:
    """Run each operation at once, in the calling thread.

    On CPU this is about twice as fast for one process (no queue threads that spin), far faster for several
    processes on few cores, and an error is raised by the operation that caused it. MindSpore looks at the
    setting once, when the process runs its first operation: later calls have no effect.
    Checked on 2.10.0: ``mindspore.runtime.launch_blocking``.
    """
    mindspore.runtime.launch_blocking()


def run_without_pool() -> None:
    """Run each operator in the thread that calls it, from now on; a number of threads set before stays.

    For a process with one core. The pool of threads of MindSpore's CPU operators waits by spinning, for about
    a millisecond after every larger operator, and takes that from whatever else wants the core: on two
    workers with a core each, a step took 1.5 times the processor time. Call it before the first operator.
    Checked on 2.10.0: ``device_context.cpu.op_tuning.threads_num``, which refuses a second call, and
    ``_c_expression.RuntimeConf.is_op_threads_num_configured``.
    """
    if not _c.RuntimeConf.get_instance().is_op_threads_num_configured():
        mindspore.device_context.cpu.op_tuning.threads_num(1)


def declared_parameter(param: Parameter) -> Parameter:
    """A Parameter with the name, shape and dtype of another, and no storage until it is given values.

    MindSpore gives parameters zeros unless their class says otherwise.
    Checked on 2.10.0: ``Parameter.init_param``.
    """
    Parameter.init_param = False
    try:
        value = initializer("zeros", tuple(param.shape), param.dtype)
        return Parameter(value, name=param.name, requires_grad=param.requires_grad)
    finally:
        Parameter.init_param = True


def keep_on_host(param: Parameter) -> None:
    """Let the executor of graphs keep a Parameter in host memory, as ``Parameter(..., device="CPU")`` does.

    Checked on 2.10.0: the user data "parameter_device", which clones inherit. It is not in the text of a
    compiled graph, and means nothing to graphs for CPU.
    """
    param._set_user_data("parameter_device", "CPU")


def device_target() -> str:
    """The device that operations run on: "CPU", "Ascend" or "GPU"."""
    return mindspore.get_context("device_target")


def is_compiled(cell: nn.Cell) -> bool:
    """Whether the ``construct`` of a Cell's class is decorated with ``mindspore.jit``.

    Checked on 2.10.0: the decorator marks what it returns.
    """
    return getattr(type(cell).construct, "__wrapped_by_jit__", False)


def world_group_name() -> str:
    """Name of the framework's world group, after the backend was initialised.

    Checked on 2.10.0: ``GlobalComm.WORLD_COMM_GROUP`` ("mccl_world_group" on CPU).
    """
    return GlobalComm.WORLD_COMM_GROUP


def fix_world_group_cache(rank: int, world_size: int) -> None:
    """Tell ``mint.distributed`` the rank and size of its world group on CPU.

    ``send`` and others look up "hccl_world_group" whatever the backend, and fail on CPU unless the cache
    already has an entry. Checked on 2.10.0: ``mint.distributed.distributed._GROUP_{RANK,SIZE}_CACHE``.
    """
    _dist_module._GROUP_RANK_CACHE["hccl_world_group"] = rank
    _dist_module._GROUP_SIZE_CACHE["hccl_world_group"] = world_size


def init_with_store(rank: int, world_size: int, port: int, timeout_s: float = 60.0) -> None:
    """Join the CPU workers of this machine without a scheduler process (rank 0 serves on 127.0.0.1:`port`).

    Only for tests (`launch` uses msrun); call it in the main thread.
    Checked on 2.10.0: ``communication.management._init_with_store``.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank > 0:
        _wait_for_listener(port, timeout_s)
    store = _dist.TCPStore("127.0.0.1", port, world_size=world_size, is_master=rank == 0, timeout=timeout)
    with _short_sleeps(first_s=0.05, later_s=0.5):
        _init_with_store(backend="mccl", timeout=timeout, world_size=world_size, rank=rank, store=store)
    fix_world_group_cache(rank, world_size)


def _wait_for_listener(port: int, timeout_s: float) -> None:
    """Return when something listens on 127.0.0.1:`port` (a refused store client would sleep for a second)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)


@contextmanager
def _short_sleeps(first_s: float, later_s: float) -> Iterator[None]:
    """Let a timer signal cut short the sleeps of C code: one soon, the others so that peers get 10 s.

    While it waits for the addresses of its peers the framework sleeps 3 s between 20 attempts, so that nearly
    every start of a job costs 3 s. Checked on 2.10.0: the sleep ends early at a signal.
    """
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, first_s, later_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

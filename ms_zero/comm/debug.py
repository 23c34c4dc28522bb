"""`train.debug_collectives`: no collective is issued before all its members have announced the same one.

Rank 0 serves a :class:`~ms_zero.comm.referee.Referee` in a thread. Each rank has a TCP connection to it, over
which it announces every call, as a line of JSON, and waits for leave to issue it. The side channel is what
makes wrong order visible: a check through the collectives would hang or mix data just as they do. A rank that
ends, for whatever reason, closes its connection, so nobody waits for the dead.

With the check on, `recv_async` waits for its send to be announced; a program in which two ranks post their
receives first, which devices allow and CPU does not, is therefore refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mindspore
from mindspore import Tensor

import ms_zero
from ms_zero.comm.backend import Backend, ReduceOp
from ms_zero.comm.communicator import Communicator
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle
from ms_zero.comm.referee import RECV, SEND, Call, Referee, Verdicts
from ms_zero.errors import UserError

#: Without any call for so long while somebody waits, a rank is taken to hang.
STALL_S = 300.0
#: How long rank 0 goes on answering after it failed itself.
_LINGER_S = 10.0
_TICK_S = 0.25

_PACKAGE = Path(ms_zero.__file__).parent
#: Code between a caller and the backend.
_HIDDEN = (
    str(_PACKAGE / "comm") + os.sep,
    str(_PACKAGE / "_compat.py"),
    str(Path(mindspore.__file__).parent) + os.sep,
)
_COMMUNICATOR = str(_PACKAGE / "comm" / "communicator.py")


class CollectiveError(UserError):
    """The ranks disagree on a collective; the message tells every rank the same."""


@contextlib.contextmanager
def checked(comm: Communicator, host: str = "127.0.0.1", stall_s: float = STALL_S) -> Iterator[Communicator]:
    """A communicator like `comm` (which must not be used meanwhile) that checks each call beforehand.

    All ranks enter together; leaving without an exception is checked like a collective. `host` is an address
    of rank 0 that the other ranks reach. `stall_s` bounds how long ranks wait for one that hangs.

    Raises:
        CollectiveError: at the first call on which the ranks disagree, on every rank.
    """
    if comm.world_size == 1:
        yield comm
        return
    server = _Server(host, comm.world_size, stall_s) if comm.rank == 0 else None
    address, token = comm.broadcast_object(server and [server.address, server.token], 0)
    client = _Client(tuple(address), token, comm.rank)
    try:
        yield comm.with_backend(lambda backend: CheckedBackend(backend, client, comm.rank))
    except BaseException as error:
        client.abort(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise
    else:
        client.finish()
    finally:
        client.close()
        if server is not None:
            server.close()


class CheckedBackend:
    """Announces each call, then passes it on.

    It sits below the communicator's checks of arguments, so that a call that is refused is not announced.
    """

    def __init__(self, inner: Backend, client: _Client, rank: int) -> None:
        self._inner, self._client, self._rank = inner, client, rank

    def world_handle(self) -> str:
        """Framework name of the group of all ranks."""
        return self._inner.world_handle()

    def create_group(self, ranks: Sequence[int]) -> str:
        """Create a group."""
        group = Group("new", tuple(ranks), tuple(ranks).index(self._rank))
        self._announce("create_group", group, {})
        return self._inner.create_group(ranks)

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """Members agree on shape, dtype and reduction."""
        self._announce("all_reduce", group, {**_signature(x), "reduction": op})
        return self._inner.all_reduce(x, group, op)

    def all_gather(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """Members agree on shape and dtype."""
        self._announce("all_gather", group, _signature(x))
        return self._inner.all_gather(x, group)

    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """Members agree on shape, dtype and reduction."""
        self._announce("reduce_scatter", group, {**_signature(x), "reduction": op})
        return self._inner.reduce_scatter(x, group, op)

    def all_to_all(
        self, x: Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Handle[Tensor]:
        """Members agree on the shape of a row, dtype and, pair by pair, on counts."""
        agree = {"row shape": str(tuple(x.shape[1:])), "dtype": str(x.dtype)}
        counts = {"send_counts": tuple(send_counts), "recv_counts": tuple(recv_counts)}
        self._announce("all_to_all", group, agree, **counts)
        return self._inner.all_to_all(x, group, send_counts, recv_counts)

    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """Members agree on shape, dtype and source."""
        self._announce("broadcast", group, {**_signature(x), "source": str(src_rank)})
        return self._inner.broadcast(x, src_rank, group)

    def send(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """Goes on at once; the receiver is checked against it."""
        self._announce(SEND, group, _signature(x), peer=dst_rank)
        return self._inner.send(x, dst_rank, group)

    def recv(self, shape: tuple[int, ...], dtype: object, src_rank: int, group: Group) -> Handle[Tensor]:
        """Waits until the sender has announced the same shape and dtype."""
        self._announce(RECV, group, {"shape": str(tuple(shape)), "dtype": str(dtype)}, peer=src_rank)
        return self._inner.recv(shape, dtype, src_rank, group)

    def barrier(self, group: Group) -> None:
        """Members agree on the group."""
        self._announce("barrier", group, {})
        self._inner.barrier(group)

    def _announce(self, op: str, group: Group, agree: dict[str, str], **more: Any) -> None:
        name, site = _caller(op)
        self._client.announce(Call(self._rank, op, name, group.name, group.ranks, agree, site, **more))


def _signature(x: Tensor) -> dict[str, str]:
    return {"shape": str(tuple(x.shape)), "dtype": str(x.dtype)}


def _caller(op: str) -> tuple[str, str]:
    """The communicator's method that was called, and "file:line" of the code outside `comm` that did."""
    name, frame = op, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        if frame.f_code.co_filename == _COMMUNICATOR and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name.removesuffix("_async")
        frame = frame.f_back
    if frame is None:
        return name, "unknown"
    return name, f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else file


class _Client:
    """One rank's connection to the referee."""

    def __init__(self, address: tuple[str, int], token: str, rank: int) -> None:
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection(address, timeout=60)
        except OSError as error:
            raise UserError(
                f"debug_collectives: rank {rank} cannot reach rank 0 at {address[0]}:{address[1]} ({error}); "
                f"open the port between the nodes or set train.debug_collectives=false"
            ) from None
        self._socket.settimeout(None)  # the server bounds every wait; its end closes the connection
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._send({"token": token, "rank": rank})

    def announce(self, call: Call) -> None:
        """Wait for leave to issue `call`."""
        self._ask({"call": asdict(call)})

    def finish(self) -> None:
        """Wait until all ranks have finished."""
        self._ask({"finish": True})

    def abort(self, reason: str) -> None:
        """Tell why this rank ends early."""
        with contextlib.suppress(OSError):
            self._send({"abort": reason})

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._socket.close()

    def _ask(self, message: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._send(message)
                line = self._lines.readline()
            except OSError:
                line = ""
        if not line:
            raise CollectiveError("debug_collectives: rank 0, which compares the collectives, is gone")
        reason = json.loads(line)["stop"]
        if reason is not None:
            raise CollectiveError(reason)

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


class _Server:
    """Serves the referee from a thread of rank 0 until all ranks have closed their connections."""

    def __init__(self, host: str, world_size: int, stall_s: float) -> None:
        self.token = secrets.token_hex(16)
        self._world_size, self._stall_s = world_size, stall_s
        self._referee = Referee(world_size)
        self._peers: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.address = [host, self._listener.getsockname()[1]]
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._closing_at: float | None = None
        self._ended = 0
        self._thread = threading.Thread(target=self._serve, name="debug_collectives", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when the others have closed their connections, at most a few seconds later."""
        self._closing_at = time.monotonic() + _LINGER_S
        self._thread.join()

    def _serve(self) -> None:
        moved = time.monotonic()
        while self._ended < self._world_size:
            for key, _ in self._selector.select(_TICK_S):
                key.data()
                moved = time.monotonic()
            now = time.monotonic()
            if self._closing_at is not None and now > self._closing_at:
                break
            if now - moved > self._stall_s and self._referee.waiting and not self._referee.failure:
                self._answer(self._referee.give_up(self._stall_s))
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, _Peer(connection, self._handle, self._lost))

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            if not secrets.compare_digest(str(message.get("token")), self.token):
                raise ValueError("not a rank of this job")
            peer.rank = int(message["rank"])
            self._peers[peer.rank] = peer.connection
        elif "call" in message:
            fields = message["call"]
            tuples = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            self._answer(self._referee.post(Call(**{**fields, **tuples})))
        elif "finish" in message:
            peer.ended = True
            self._answer(self._referee.finish(peer.rank))
        else:
            peer.ended = True
            self._answer(self._referee.abort(peer.rank, message["abort"]))

    def _lost(self, peer: _Peer) -> None:
        """A connection was closed: by a rank at its end, by one that died, or by a stranger."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is None:
            return
        self._ended += 1
        del self._peers[peer.rank]
        if not peer.ended:
            self._answer(self._referee.abort(peer.rank, "the process died"))

    def _answer(self, verdicts: Verdicts) -> None:
        """Rank 0 last: once it goes on it may hold the interpreter until its peers act on their answers."""
        for rank in sorted(verdicts, reverse=True):
            if rank in self._peers:
                with contextlib.suppress(OSError):
                    self._peers[rank].sendall(json.dumps({"stop": verdicts[rank]}).encode() + b"\n")


class _Peer:
    """One connection of the server: called when it is readable."""

    def __init__(
        self,
        connection: socket.socket,
        handle: Callable[[_Peer, dict[str, Any]], None],
        lost: Callable[[_Peer], None],
    ) -> None:
        self.connection, self.rank, self.ended = connection, None, False
        self._handle, self._lost, self._data = handle, lost, b""

    def __call__(self) -> None:
        try:
            chunk = self.connection.recv(1 << 16)
        except OSError:
            chunk = b""
        *lines, self._data = (self._data + chunk).split(b"\n")
        try:
            for line in lines:
                self._handle(self, json.loads(line))
        except (ValueError, KeyError, TypeError):
            chunk = b""
        if not chunk:
            self._lost(self)

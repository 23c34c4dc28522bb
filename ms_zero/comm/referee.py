"""Compares the collectives that ranks are about to issue. Pure logic; `ms_zero.comm.debug` carries messages.

Every rank announces each call and waits for the verdict, so at any time a rank waits in at most one call and
cannot issue another before that one is allowed. Hence nothing has to be guessed from elapsed time: a call is
hopeless exactly when it needs a rank that has left, or when the calls that ranks wait in need each other in a
circle (a deadlock, for instance two groups used in different orders).
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SEND, RECV = "send", "recv"
#: Why a rank left that has issued all its calls.
_FINISHED = "has finished"


@dataclass(frozen=True)
class Call:
    """One rank's view of one collective. All fields survive JSON.

    Attributes:
        rank: who calls.
        op: operation as the backend knows it.
        name: operation as the caller knows it ("exchange" is made of all_gather).
        group: label of the group.
        ranks: members of the group.
        agree: what all members must have alike, by name ("shape", "dtype", "reduction", "source", ...).
        site: file and line of the caller.
        peer: the other rank of a message; -1 for collectives.
        send_counts: rows for each member (all_to_all).
        recv_counts: rows from each member (all_to_all).
    """

    rank: int
    op: str
    name: str
    group: str
    ranks: tuple[int, ...]
    agree: dict[str, str]
    site: str
    peer: int = -1
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()

    def text(self) -> str:
        """The call in words, without rank and site."""
        details = "".join(f", {key} {value}" for key, value in self.agree.items())
        if self.send_counts:
            details += f", sends {list(self.send_counts)}, receives {list(self.recv_counts)}"
        place = {SEND: f" to rank {self.peer}", RECV: f" from rank {self.peer}"}.get(self.op, "")
        return f"{self.name}{place} on group {self.group} {self.ranks}{details}"

    def located(self) -> str:
        """The call in words with its site."""
        return f"{self.text()}, at {self.site}"


#: Who may go on (None) and who must stop (the reason).
Verdicts = dict[int, str | None]


@dataclass
class Referee:
    """Matches the calls of `world_size` ranks.

    :meth:`post`, :meth:`finish`, :meth:`abort` and :meth:`give_up` return verdicts for the ranks that wait.
    After the first disagreement, `failure` holds it and every later call gets it too.
    """

    world_size: int
    failure: str | None = None
    _waiting: dict[int, Call] = field(default_factory=dict)
    _left: dict[int, str] = field(default_factory=dict)
    _messages: defaultdict[tuple[int, int], deque[Call]] = field(default_factory=lambda: defaultdict(deque))
    _done: defaultdict[tuple[int, ...], int] = field(default_factory=lambda: defaultdict(int))
    _last: dict[int, Call] = field(default_factory=dict)
    _hint: str = ""

    @property
    def waiting(self) -> bool:
        """Somebody waits for a verdict."""
        return bool(self._waiting) or _FINISHED in self._left.values()

    def post(self, call: Call) -> Verdicts:
        """Rank ``call.rank`` is about to issue `call`."""
        if self.failure:
            return {call.rank: self.failure}
        if call.op == SEND:
            return self._post_send(call)
        self._waiting[call.rank] = call
        verdicts = self._match_message(call) if call.op == RECV else self._match_collective(call)
        return verdicts or self._look_for_deadlock(call)

    def finish(self, rank: int) -> Verdicts:
        """`rank` has issued all its calls. The verdict comes when all ranks have finished."""
        return self._leave(rank, _FINISHED)

    def abort(self, rank: int, reason: str) -> Verdicts:
        """`rank` ends before its time and waits for no verdict."""
        return self._leave(rank, f"ended: {reason}")

    def give_up(self, waited_s: float) -> Verdicts:
        """Nothing happened for too long: blame the ranks that neither wait nor have left."""
        absent = [r for r in range(self.world_size) if r not in self._waiting and r not in self._left]
        state = "; ".join(f"rank {r}: last call was {self._last_call(r)}" for r in absent)
        return self._fail(f"no progress for {waited_s:g} s: {self._where_waiting()}; {state}")

    def _post_send(self, call: Call) -> Verdicts:
        """Sends are buffered: the sender goes on at once."""
        self._messages[call.rank, call.peer].append(call)
        self._last[call.rank] = call
        receiver = self._waiting.get(call.peer)
        verdicts: Verdicts = {}
        if call.peer in self._left:
            verdicts = self._fail(f"{self._who(call)}, but rank {call.peer} {self._left[call.peer]}")
        elif receiver is not None and receiver.op == RECV and receiver.peer == call.rank:
            verdicts = self._match_message(receiver)
        return {call.rank: self.failure, **verdicts}

    def _match_message(self, receive: Call) -> Verdicts:
        messages = self._messages[receive.peer, receive.rank]
        if not messages:
            return {}
        sent = messages.popleft()
        if (sent.agree, sent.ranks, sent.group) != (receive.agree, receive.ranks, receive.group):
            return self._fail(
                f"a message and its receiver disagree: {self._who(sent)}; {self._who(receive)}"
            )
        return self._allow([receive.rank])

    def _match_collective(self, call: Call) -> Verdicts:
        calls = [self._waiting[rank] for rank in call.ranks if self._meets(rank, call)]
        if len(calls) < len(call.ranks):
            return {}
        number = self._done[call.ranks] + 1
        reason = self._disagreement(calls, number) or self._message_on_the_way(calls)
        if reason:
            return self._fail(reason)
        self._done[call.ranks] = number
        self._note_sites(calls, number)
        return self._allow(call.ranks)

    def _meets(self, rank: int, call: Call) -> bool:
        other = self._waiting.get(rank)
        return other is not None and other.op != RECV and call.op != RECV and other.ranks == call.ranks

    def _disagreement(self, calls: Sequence[Call], number: int) -> str | None:
        kinds = [(c.op, c.name, c.group, c.agree) for c in calls]
        if any(kind != kinds[0] for kind in kinds):
            return f"call {number} of the ranks {calls[0].ranks} differs: {self._list(calls)}"
        for sender, receiver in itertools.product(calls, calls):
            sends = sender.send_counts[receiver.ranks.index(receiver.rank)] if sender.send_counts else 0
            expected = receiver.recv_counts[sender.ranks.index(sender.rank)] if receiver.recv_counts else 0
            if sends != expected:
                return (
                    f"call {number} of the ranks {calls[0].ranks} differs in its counts: rank {sender.rank} "
                    f"sends {sends} rows to rank {receiver.rank}, which expects {expected}: "
                    f"{self._list(calls)}"
                )
        return None

    def _message_on_the_way(self, calls: Sequence[Call]) -> str | None:
        """A message between members that was sent before this collective but not received before it."""
        members = calls[0].ranks
        for (sender, receiver), messages in self._messages.items():
            if messages and sender in members and receiver in members:
                return (
                    f"a message was not received in order: {self._who(messages[0])}; then "
                    f"{self._who(self._waiting[receiver])}"
                )
        return None

    def _look_for_deadlock(self, call: Call) -> Verdicts:
        """Only the newest call can close a circle."""
        gone = [rank for rank in self._needs(call) if rank in self._left]
        if gone:
            return self._fail(self._left_early(call, gone[0]))
        circle = self._circle(call)
        if not circle:
            return {}
        waits = self._list([self._waiting[rank] for rank in circle])
        return self._fail(f"the ranks wait for each other in different calls: {waits}")

    def _circle(self, call: Call) -> list[int]:
        """Ranks that wait for each other, starting with the caller; empty when there is no circle."""
        came_from: dict[int, int] = {}
        queue = deque([call.rank])
        while queue:
            rank = queue.popleft()
            for needed in self._needs(self._waiting[rank]):
                if needed == call.rank:
                    path = [rank]
                    while path[-1] != call.rank:
                        path.append(came_from[path[-1]])
                    return path
                if needed in self._waiting and needed not in came_from:
                    came_from[needed] = rank
                    queue.append(needed)
        return []

    def _needs(self, call: Call) -> list[int]:
        """Ranks whose next call must come before `call` can go on."""
        if call.op == RECV:
            return [call.peer]
        return [rank for rank in call.ranks if not self._meets(rank, call)]

    def _leave(self, rank: int, reason: str) -> Verdicts:
        if self.failure:
            return {rank: self.failure}
        self._left[rank] = reason
        for (_, receiver), messages in self._messages.items():
            if messages and receiver == rank:
                return self._fail(f"{self._who(messages[0])}, but rank {rank} {reason} without receiving it")
        for call in self._waiting.values():
            if rank in self._needs(call):
                return self._fail(self._left_early(call, rank))
        if len(self._left) == self.world_size:
            return dict.fromkeys(range(self.world_size))
        return {}

    def _left_early(self, call: Call, rank: int) -> str:
        last = self._last_call(rank)
        return f"{self._who(call)}, but rank {rank} {self._left[rank]}; its last call was {last}"

    def _allow(self, ranks: Iterable[int]) -> Verdicts:
        for rank in ranks:
            self._last[rank] = self._waiting.pop(rank)
        return dict.fromkeys(ranks)

    def _fail(self, reason: str) -> Verdicts:
        """Stop everybody who waits, those who wait to finish included."""
        self.failure = f"debug_collectives: {reason}{self._hint}"
        finished = [rank for rank, why in self._left.items() if why == _FINISHED]
        stopped = sorted({*self._waiting, *finished})
        self._waiting.clear()
        return dict.fromkeys(stopped, self.failure)

    def _note_sites(self, calls: Sequence[Call], number: int) -> None:
        """Members may call from different lines, but where they first did is a hint when they later fail."""
        if not self._hint and any(call.site != calls[0].site for call in calls):
            self._hint = (
                f"; hint: the first calls that matched but came from different lines: call {number} of the "
                f"ranks {calls[0].ranks}: {self._list(calls)}"
            )

    def _where_waiting(self) -> str:
        calls = [self._waiting[rank] for rank in sorted(self._waiting)]
        return self._list(calls) or "all other ranks have finished"

    def _last_call(self, rank: int) -> str:
        return self._last[rank].located() if rank in self._last else "none"

    @staticmethod
    def _who(call: Call) -> str:
        return f"rank {call.rank}: {call.located()}"

    @staticmethod
    def _list(calls: Iterable[Call]) -> str:
        """Calls by rank, ranks with the same call together."""
        ranks: dict[str, list[int]] = {}
        for call in sorted(calls, key=lambda call: call.rank):
            ranks.setdefault(call.located(), []).append(call.rank)
        return "; ".join(f"{_rank_list(members)}: {text}" for text, members in ranks.items())


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

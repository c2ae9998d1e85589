"""Learner ranks: processes started by torchrun, or anything that sets the same variables.

A sum in shard order is computed in slices: every rank receives its slice of all shards' vectors,
adds them in order, and sends the result to the others. Each number is the same sum as in one
process, and a rank receives about two vectors (or shards / ranks of them, if that is more) instead
of one for every shard.
"""

from __future__ import annotations

import io
import ipaddress
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from etude.core.contracts import Broadcast, Collector, Fragment, Snapshot
from etude.core.errors import EtudeError, NonFinite, describe_error
from etude.core.ranks import ALONE, LostRank, Ranks, ReportedElsewhere, named
from etude.core.trees import Tree, is_array
from etude.rollout.local import CollectorWrapper, group_snapshots, group_state
from etude.runs import tensors
from etude.training.evaluation import AnyEvaluator, EvaluationResult


def encode(value: Any) -> bytes:
    """Serialise dicts with names, lists, numbers, strings, None and arrays, bit for bit."""
    arrays: dict[str, Any] = {}
    text = json.dumps(_without(value, arrays)).encode()
    layout = tensors.layout(arrays)
    return b"".join([len(text).to_bytes(8, "little"), text, *tensors.chunks(arrays, layout)])


def decode(data: bytes) -> Any:
    """The inverse of `encode`; tuples become lists. Each array has its own memory."""
    stream = io.BytesIO(data)
    length = int.from_bytes(stream.read(8), "little")
    text = stream.read(length)
    return _with(json.loads(text), tensors.read(stream, len(data) - 8 - length))


def _without(value: Any, arrays: dict[str, Any]) -> Any:
    """The value as JSON; an object is a dict or the name of an array, which goes to `arrays`."""
    if is_array(value):
        name = str(len(arrays))
        arrays[name] = value
        return {"array": name}
    if isinstance(value, dict):
        return {"dict": {name: _without(item, arrays) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_without(item, arrays) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _with(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_with(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    return {name: _with(item, arrays) for name, item in value["dict"].items()}


BEAT = 0.5
"""Seconds between two heartbeats, and between two reads of those of other ranks."""
GONE = 3.0
"""Seconds of silence after which a rank with a broken connection counts as ended."""
LARGEST_NOTE = 4 << 20
"""Bytes of a note with arrays, at most; the limit of the store is 8 MiB."""
CONTINUE = (
    "The last checkpoint is untouched; `etude resume RUN` continues from it, bit for bit, on any "
    "number of ranks that divides learner.shards."
)


class Heartbeat:
    """This rank's heartbeat, and those of the other ranks."""

    def __init__(self, rank: int, size: int, store: Store, held: object) -> None:
        """held: never released if the rank ends early, since the destructor of torch's process
        group waits for exchanges that may never end."""
        self.rank, self.size = rank, size
        self.exchanges = 0
        """The number of exchanges that this rank has begun."""
        self._exchanges = [0] * size
        self._counts = [0] * size
        self._notes: dict[int, bytes] = {}
        self._note: bytes | None = None
        self._is_noted = False
        self._polled = self._known = time.monotonic()
        self._heard = [self._polled] * size
        self._unanswered = 0
        self._wake, self._ends, self._rests = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, args=[store, held], daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat. The thread must not access the store when Python ends."""
        self._ends.set()
        self._wake.set()
        if self._has_store:
            self._rests.wait(GONE)
        if self._note is None:
            self._thread.join(GONE)

    def leave(self, error: BaseException) -> None:
        """Send the error with which this rank ends to the others."""
        self._note = _note(error, self.rank)
        self._wake.set()
        if self._has_store:
            _wait(lambda: self._is_noted, GONE)
        if self.rank == 0:  # The store may end with this process: wait until others have read it.
            others = set(range(1, self.size))
            _wait(lambda: others <= {*self._notes, *self._silent(GONE)}, 2 * GONE)
        self.stop()

    def check(self, patience: float) -> None:
        """Raise the error with which another rank has ended, or an error if one has been silent for
        `patience` seconds.

        Call it every BEAT seconds while waiting: without an answer from the store, time is counted
        in calls, since after a freeze of this process its clock is far ahead.
        """
        if notes := dict(self._notes):
            errors = [_error(rank, note) for rank, note in sorted(notes.items())]
            raise min(errors, key=lambda error: isinstance(error, LostRank))
        self._unanswered = self._unanswered + 1 if self._known == self._polled else 0
        self._known = self._polled
        unreachable = self._unanswered * BEAT >= patience
        if silent := [0] if unreachable else self._silent(patience):
            raise LostRank(
                f"No sign of life from {named(silent)} for {patience:.0f} s: killed, frozen or "
                f"cut off. {CONTINUE}"
            )

    def explain(self, error: RuntimeError, seconds: float = 2 * GONE) -> NoReturn:
        """Raise the reason why an exchange broke, once it is known, at most after `seconds`."""
        for _ in range(int(seconds / BEAT)):
            self.check(GONE)
            time.sleep(BEAT)
        behind = [r for r, count in enumerate(self._exchanges) if count < self.exchanges]
        missing = f": {named(behind)} did not take part" if behind else ""
        raise LostRank(
            f"An exchange between ranks broke, though all of them are alive{missing} "
            f"({describe_error(error)}). {CONTINUE}"
        ) from error

    @property
    def _has_store(self) -> bool:
        """Whether the store has answered recently."""
        return self._unanswered * BEAT < GONE

    def _silent(self, seconds: float) -> list[int]:
        return [r for r, heard in enumerate(self._heard) if self._polled - heard >= seconds]

    def _run(self, store: Store, held: object) -> None:
        count = 0
        with suppress(RuntimeError):  # The store has ended: the last heartbeats are the newest.
            while not self._ends.is_set():
                count += 1
                with suppress(DistStoreError):  # A rank has not joined yet.
                    self._beat(store, count)
                self._wake.wait(BEAT)
                self._wake.clear()
        self._ends.wait()
        self._rests.set()
        if self._note is not None:
            threading.Event().wait()

    def _beat(self, store: Store, count: int) -> None:
        note = self._note
        if note is not None and not self._is_noted:
            store.set(f"note/{self.rank}", note)  # type: ignore[arg-type]
        store.set(f"beat/{self.rank}", f"{count} {self.exchanges} {note is not None:d}")
        self._is_noted = note is not None
        beats = store.multi_get([f"beat/{rank}" for rank in range(self.size)])
        polled = time.monotonic()
        for rank, beat in enumerate(beats):
            count, self._exchanges[rank], left = map(int, beat.split())
            if count != self._counts[rank]:
                self._counts[rank], self._heard[rank] = count, polled
            if left and rank != self.rank and rank not in self._notes:
                self._notes[rank] = store.get(f"note/{rank}")
        self._polled = polled


def _wait(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


def _note(error: BaseException, rank: int) -> bytes:
    """Serialise an error for other ranks."""
    code = int(getattr(error, "exit_code", EtudeError.exit_code))
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, NonFinite):
        note = encode([code, "", trace, error.where, error.arrays])
        return note if len(note) <= LARGEST_NOTE else encode([code, "", trace, error.where, {}])
    if isinstance(error, LostRank):
        return encode([code, str(error), "", None, {}])
    text = str(error) if isinstance(error, EtudeError) else f"{describe_error(error)}."
    return encode([code, f"Rank {rank} failed: {text}", trace, None, {}])


def _error(rank: int, note: bytes) -> EtudeError:
    """The error of a note."""
    code, text, trace, where, arrays = decode(note)
    if where is not None:
        error: EtudeError = NonFinite(where, arrays)
    else:
        error = EtudeError(text) if trace else LostRank(text)
    error.exit_code = code
    error.add_note(f"On rank {rank}:\n{trace}")
    return error


T = TypeVar("T")

LONGEST = timedelta(minutes=30)
"""The maximum wait for a rank that is alive, for example the first one during an evaluation."""
PATIENCE = 120.0
"""Seconds that a rank waits for a silent one, until the recipe is known."""
BLOCK = 2048
"""Bytes of a message in its first exchange; few are longer."""


@contextmanager
def connected(size: int) -> Iterator[Ranks]:
    """The ranks that this process was started with, `size` of them."""
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _connect(rank, size)
        heart = Heartbeat(rank, size, _store(), distributed.group.WORLD)
    except RuntimeError as error:
        raise LostRank(
            f"Rank {rank} could not connect to the others: one of them was killed, failed or "
            f"cannot be reached. {CONTINUE}"
        ) from error
    try:
        yield Distributed(heart)
    except BaseException as error:
        heart.leave(error)
        if rank and isinstance(error, EtudeError) and not isinstance(error, LostRank):
            raise ReportedElsewhere(error.exit_code) from error
        raise
    else:
        heart.stop()
    finally:
        distributed.destroy_process_group()


def _connect(rank: int, size: int) -> None:
    """Connect to the other ranks. If all are on this machine, sockets are on loopback only."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = None
    if _is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            store = _loopback_store(host, port, rank, size)
    distributed.init_process_group(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=LONGEST,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def _loopback_store(host: str, port: int, rank: int, size: int) -> TCPStore:
    """A store on the loopback interface alone: torch's default listens on all of them."""
    listener: int | None = None
    if rank == 0:
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((socket.gethostbyname(host), port))
        except OSError as error:
            door.close()
            raise LostRank(f"Ranks cannot connect at {host}:{port}: {error.strerror}.") from error
        door.listen(size)
        listener = door.detach()
    return TCPStore(
        host, port, size, rank == 0, timeout=timedelta(minutes=5), master_listen_fd=listener
    )


def _store() -> PrefixStore:
    """A new connection to the store of the ranks; each start has its own keys."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(host, port, timeout=timedelta(seconds=10), wait_for_workers=False)
    return PrefixStore(f"etude/{attempt}", store)


class Distributed:
    """One of several ranks; see `Ranks`."""

    def __init__(
        self,
        heart: Heartbeat,
        exactly: bool = True,
        patience: Callable[[], float] = lambda: PATIENCE,
    ) -> None:
        self._heart, self._exactly, self._patience = heart, exactly, patience
        self.rank, self.size = heart.rank, heart.size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> range:
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def owner(self, index: int, count: int) -> str:
        return f", on rank {index * self.size // count}"

    def adding(self, exactly: bool, patience: Callable[[], float]) -> Ranks:
        return Distributed(self._heart, exactly, patience)

    def from_first(self, make: Callable[[], T]) -> T:
        if self.is_first:
            value = make()
            self._broadcast(encode(value))
            return value
        received: T = decode(self._broadcast(None))
        return received

    def differing(self, make: Callable[[], str]) -> list[int]:
        first, *others = self.gather([make()])
        return [rank for rank, one in enumerate(others, 1) if one != first]

    def gather(self, parts: list[T]) -> list[T]:
        everyone = self._all_gather(encode(parts))
        lists = [parts if r == self.rank else decode(data) for r, data in enumerate(everyone)]
        return [part for one in lists for part in one]

    def ordered_sum(self, totals: Sequence[torch.Tensor], shards: Sequence[T]) -> Iterator[T]:
        if not self._exactly:
            yield from ALONE.ordered_sum(totals, shards)
            for total in totals:
                self._exchange(distributed.all_reduce, total)
            return
        packs = [_Pack(same, self.size, len(shards)) for same in _by_type(totals)]
        for i, shard in enumerate(shards):
            yield from ALONE.ordered_sum(totals, [shard])
            for pack in packs:
                pack.put(i)
        for pack in packs:
            pack.exchange(self._exchange)

    def _exchange(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Take part in a collective; while it waits, check that the other ranks are alive."""
        self._heart.exchanges += 1
        try:
            work = collective(*arguments, async_op=True)
        except RuntimeError as error:
            self._heart.explain(error)
        last = arguments[1] if isinstance(arguments[0], list) else arguments[0]
        # Work on a GPU is not waited for here, but where its result is read.
        limit = () if last.is_cuda else (timedelta(seconds=BEAT),)
        while True:
            try:
                work.wait(*limit)
                return
            except RuntimeError as error:
                if last.is_cuda or work.is_completed():
                    self._heart.explain(error)
            self._heart.check(self._patience())

    def _broadcast(self, message: bytes | None) -> bytes:
        """Broadcast the first rank's message; the others pass None."""
        block = torch.zeros(BLOCK, dtype=torch.uint8) if message is None else _block(message)
        self._exchange(distributed.broadcast, block, 0)
        length = _length(block)
        if length <= BLOCK - 8:
            return _bytes(block[8 : 8 + length])
        whole = torch.zeros(length, dtype=torch.uint8)
        if message is not None:
            whole.copy_(_tensor(message))
        self._exchange(distributed.broadcast, whole, 0)
        return _bytes(whole)

    def _all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in the order of ranks."""
        blocks = list(torch.zeros(self.size, BLOCK, dtype=torch.uint8))
        self._exchange(distributed.all_gather, blocks, _block(message))
        lengths = [_length(block) for block in blocks]
        if max(lengths) <= BLOCK - 8:
            return [_bytes(b[8 : 8 + n]) for b, n in zip(blocks, lengths, strict=True)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = _tensor(message)
        wholes = [torch.zeros_like(padded) for _ in blocks]
        self._exchange(distributed.all_gather, wholes, padded)
        return [_bytes(whole[:n]) for whole, n in zip(wholes, lengths, strict=True)]


class SharedCollector(CollectorWrapper):
    """Each rank collects the groups of its own shards; a checkpoint holds those of all ranks."""

    def __init__(self, ranks: Ranks, local: Collector) -> None:
        """local: the collector of this rank's groups."""
        super().__init__(local)
        self._ranks = ranks
        self._gathered: list[Snapshot] | None = None

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """The next fragment of every group of this rank."""
        self._gathered = None
        try:
            return self._inner.collect(broadcast, iteration)
        except NonFinite as fault:
            owner = self._ranks.owner(self._ranks.rank, self._ranks.size)
            raise NonFinite(f"{fault.where}{owner}", fault.arrays) from fault

    def gather(self) -> None:
        """Gather the snapshots of all ranks' groups, for `state_dict`."""
        local = group_snapshots(self._inner.state_dict()) or []
        self._gathered = self._ranks.gather(local)

    def state_dict(self) -> Tree:
        """The state with the groups of all ranks, which `gather` has gathered."""
        if self._gathered is None:
            raise RuntimeError("gather() comes before state_dict() of a collector with ranks")
        return {**self._inner.state_dict(), **group_state(self._gathered)}

    def load_state_dict(self, state: Tree) -> None:
        groups = group_snapshots(state) or []
        local = self._ranks.part(len(groups))
        self._inner.load_state_dict({**state, **group_state(groups[local.start : local.stop])})


class FirstRankEvaluator(AnyEvaluator):
    """An evaluator that only the first rank has; its results are broadcast to the others."""

    def __init__(self, ranks: Ranks, evaluator: AnyEvaluator | None) -> None:
        """evaluator: None on all ranks except the first."""
        super().__init__()
        self._ranks, self._evaluator = ranks, evaluator

    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        def on_first() -> EvaluationResult:
            assert self._evaluator is not None
            return self._evaluator.evaluate(broadcast)

        result = EvaluationResult(*self._ranks.from_first(on_first))
        self._copy_results()
        return result

    def _copy_results(self) -> None:
        if self._evaluator is not None:
            self.best, self.num_done = self._evaluator.best, self._evaluator.num_done
            self.num_episodes = self._evaluator.num_episodes

    def state_dict(self) -> Tree:
        return {} if self._evaluator is None else self._evaluator.state_dict()

    def load_state_dict(self, state: Tree) -> None:
        if self._evaluator is not None:
            self._evaluator.load_state_dict(state)
            self._copy_results()

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()


class _Pack:
    """Tensors of one dtype whose sum is exchanged, as [ranks, local shards, slice]."""

    def __init__(self, totals: Sequence[torch.Tensor], ranks: int, shards: int) -> None:
        self._totals = totals
        self._width = sum(total.numel() for total in totals)
        size = -(-self._width // ranks)
        self._whole = totals[0].new_zeros(ranks, size)
        self._parts = totals[0].new_zeros(ranks, shards, size)

    def put(self, shard: int) -> None:
        """Store the contribution of one of this rank's shards."""
        flat = self._whole.view(-1)[: self._width]
        torch.cat([total.detach().reshape(-1) for total in self._totals], out=flat)
        self._parts[:, shard] = self._whole

    def exchange(self, through: Callable[..., None]) -> None:
        """Set the totals to their sums over all shards, in shard order."""
        received = torch.empty_like(self._parts)
        through(distributed.all_to_all_single, received, self._parts)
        mine = torch.zeros_like(self._whole[0])
        for part in received.flatten(0, 1):
            mine += part
        through(distributed.all_gather, list(self._whole), mine)
        start, flat = 0, self._whole.view(-1)
        for total in self._totals:
            end = start + total.numel()
            total.copy_(flat[start:end].view_as(total))
            start = end


def _by_type(totals: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for total in totals:
        kinds.setdefault(total.dtype, []).append(total)
    return list(kinds.values())


def _tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _block(message: bytes) -> torch.Tensor:
    """The length of a message, and the message if it is short."""
    short = message if len(message) <= BLOCK - 8 else b""
    return _tensor((len(message).to_bytes(8, "little") + short).ljust(BLOCK, b"\0"))


def _length(block: torch.Tensor) -> int:
    return int.from_bytes(_bytes(block[:8]), "little")


def _bytes(data: Any) -> bytes:
    return bytes(data.numpy().tobytes())

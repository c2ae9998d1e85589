"""Ranks as processes that torchrun (or anything that sets the same variables) has started.

A sum in shard order is taken in slices: every rank receives its slice of all shards' vectors, adds
them up in order, and sends the result to the others. Each number is the same sum as in one process,
and a rank receives about two vectors, or shards / ranks of them where that is more, rather than
one for every shard.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from etude.core.errors import EtudeError
from etude.core.ranks import ALONE, LostRank, Ranks, ReportedElsewhere
from etude.training.heartbeat import BEAT, CONTINUE, Heartbeat
from etude.training.messages import decode, encode

T = TypeVar("T")

LONGEST = timedelta(minutes=30)
"""How long a rank waits for another that lives, such as the first in an evaluation."""
PATIENCE = 120.0
"""Seconds that a rank waits for one without a sign of life, before the recipe says how long."""
BLOCK = 2048
"""Bytes of a message that fit into its first exchange; few are longer."""


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
            f"Rank {rank} did not meet the others: one of them was killed, failed or cannot be "
            f"reached. {CONTINUE}"
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
    """Meet the others. Where all are on this machine, nothing listens beyond it."""
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
            raise LostRank(f"Ranks cannot meet at {host}:{port}: {error.strerror}.") from error
        door.listen(size)
        listener = door.detach()
    return TCPStore(
        host, port, size, rank == 0, timeout=timedelta(minutes=5), master_listen_fd=listener
    )


def _store() -> PrefixStore:
    """A new connection to the store at which the ranks have met; each start has its own keys."""
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
        """Take part in a collective; while it waits, check that the other ranks live."""
        self._heart.exchanges += 1
        try:
            work = collective(*arguments, async_op=True)
        except RuntimeError as error:
            self._heart.explain(error)
        last = arguments[1] if isinstance(arguments[0], list) else arguments[0]
        # Work on a GPU is only waited for where its result is read.
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
        """The first rank's message; only that one gives it."""
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
        """The messages of all ranks, in their order."""
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


class _Pack:
    """Tensors of one type whose sum is exchanged: [ranks, local shards, slice]."""

    def __init__(self, totals: Sequence[torch.Tensor], ranks: int, shards: int) -> None:
        self._totals = totals
        self._width = sum(total.numel() for total in totals)
        size = -(-self._width // ranks)
        self._whole = totals[0].new_zeros(ranks, size)
        self._parts = totals[0].new_zeros(ranks, shards, size)

    def put(self, shard: int) -> None:
        """Keep what one of this rank's shards has added."""
        flat = self._whole.view(-1)[: self._width]
        torch.cat([total.detach().reshape(-1) for total in self._totals], out=flat)
        self._parts[:, shard] = self._whole

    def exchange(self, through: Callable[..., None]) -> None:
        """The totals over all shards, added in shard order."""
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
    """The message's length, and the message if it is short."""
    short = message if len(message) <= BLOCK - 8 else b""
    return _tensor((len(message).to_bytes(8, "little") + short).ljust(BLOCK, b"\0"))


def _length(block: torch.Tensor) -> int:
    return int.from_bytes(_bytes(block[:8]), "little")


def _bytes(data: Any) -> bytes:
    return bytes(data.numpy().tobytes())

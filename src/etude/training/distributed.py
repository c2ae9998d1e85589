"""Ranks as processes that torchrun (or anything that sets the same variables) has started.

A sum in shard order is taken in slices: every rank is sent its slice of all shards' vectors, adds
them up in order, and tells the others the result. Each number is the same sum as in one process,
and a rank receives about two vectors, or shards / ranks of them where that is more, rather than
one for every shard.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from etude.core.ranks import ALONE, LostRank, Ranks, ToldElsewhere
from etude.training.messages import decode, encode

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for one that still lives, such as the first in an evaluation."""
BLOCK = 2048
"""Bytes of a message that fit into its first exchange; few are longer."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def writes() -> bool:
    """Whether this process is the one that writes and speaks."""
    return _size() == 1 or int(os.environ["RANK"]) == 0


def was_restarted() -> bool:
    """Whether torchrun has started these processes again, after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _size() -> int:
    """How many processes were started together."""
    there = all(os.environ.get(name) for name in VARIABLES)
    return int(os.environ["WORLD_SIZE"]) if there else 1


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks this process was started with; itself alone, if with none."""
    if _size() == 1:
        yield ALONE
        return
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with _in_touch(rank):
        _connect(rank, _size())
    try:
        yield Distributed(rank, _size())
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
        timeout=PATIENCE,
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
    """Torch's own would listen on every interface: it is given a socket that does not."""
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


@contextmanager
def _in_touch(rank: int) -> Iterator[None]:
    """Say in a sentence that others are gone, which torch does in a page."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(
            f"Rank {rank} ends here: another rank was killed, failed or cannot be reached. The "
            "last checkpoint is untouched; `etude resume RUN` continues from it, bit for bit, on "
            "any number of ranks that divides learner.shards."
        ) from error


class Distributed:
    """One of several ranks; see `Ranks`."""

    def __init__(self, rank: int, size: int, exactly: bool = True) -> None:
        self.rank, self.size, self._exactly = rank, size, exactly

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> range:
        own = count // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def adding(self, exactly: bool) -> Ranks:
        return Distributed(self.rank, self.size, exactly)

    def from_first(self, make: Callable[[], T]) -> T:
        if self.is_first:
            try:
                value = make()
                message = encode([value])
            except BaseException:
                with suppress(LostRank):  # What went wrong here is what is to be told.
                    self._broadcast(encode([]))
                raise
            self._broadcast(message)
            return value
        told = decode(self._broadcast(None))
        if not told:
            raise ToldElsewhere
        value = told[0]
        return value

    def gather(self, parts: list[T]) -> list[T]:
        everyone = self._all_gather(encode(parts))
        told = [parts if r == self.rank else decode(data) for r, data in enumerate(everyone)]
        return [part for own in told for part in own]

    def ordered_sum(
        self, totals: Sequence[torch.Tensor], shards: Sequence[Callable[[], object]]
    ) -> None:
        if not self._exactly:
            ALONE.ordered_sum(totals, shards)
            with _in_touch(self.rank):
                for total in totals:
                    distributed.all_reduce(total)
            return
        packs = [_Pack(same, self.size, len(shards)) for same in _by_type(totals)]
        for i, add in enumerate(shards):
            ALONE.ordered_sum(totals, [add])
            for pack in packs:
                pack.put(i)
        with _in_touch(self.rank):
            for pack in packs:
                pack.exchange()

    def _broadcast(self, message: bytes | None) -> bytes:
        """The first rank's message; only that one gives it."""
        block = torch.zeros(BLOCK, dtype=torch.uint8) if message is None else _block(message)
        with _in_touch(self.rank):
            distributed.broadcast(block, 0)
            length = _length(block)
            if length <= BLOCK - 8:
                return _bytes(block[8 : 8 + length])
            whole = torch.zeros(length, dtype=torch.uint8)
            if message is not None:
                whole.copy_(_tensor(message))
            distributed.broadcast(whole, 0)
        return _bytes(whole)

    def _all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order."""
        blocks = list(torch.zeros(self.size, BLOCK, dtype=torch.uint8))
        with _in_touch(self.rank):
            distributed.all_gather(blocks, _block(message))
            lengths = [_length(block) for block in blocks]
            if max(lengths) <= BLOCK - 8:
                return [_bytes(b[8 : 8 + n]) for b, n in zip(blocks, lengths, strict=True)]
            own = torch.zeros(max(lengths), dtype=torch.uint8)
            own[: len(message)] = _tensor(message)
            wholes = [torch.zeros_like(own) for _ in blocks]
            distributed.all_gather(wholes, own)
        return [_bytes(whole[:n]) for whole, n in zip(wholes, lengths, strict=True)]


class _Pack:
    """Totals of one type on their way to being sums: [ranks, own shards, slice]."""

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

    def exchange(self) -> None:
        """The totals over all shards, added in shard order."""
        received = torch.empty_like(self._parts)
        distributed.all_to_all_single(received, self._parts)
        mine = torch.zeros_like(self._whole[0])
        for part in received.flatten(0, 1):
            mine += part
        distributed.all_gather(list(self._whole), mine)
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

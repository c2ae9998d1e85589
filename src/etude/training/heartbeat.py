"""Heartbeats of ranks, and why a rank has ended, beside their collectives.

A collective waits in silence for a rank that is frozen or cut off, and breaks without a reason
where one has failed. So a thread of each rank counts in the store at which the ranks have met, and
reads the counts of the others. A rank that ends early leaves a note in the store.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from etude.core.errors import EtudeError, NonFinite
from etude.core.imports import describe
from etude.core.ranks import LostRank, named
from etude.training.messages import decode, encode

BEAT = 0.5
"""Seconds between two heartbeats, and between two reads of the others'."""
GONE = 3.0
"""Seconds of silence after which a rank whose connection broke is taken to have ended."""
LARGEST_NOTE = 4 << 20
"""Bytes; a store takes 8 MiB at most, and a report can do without its arrays."""
CONTINUE = (
    "The last checkpoint is untouched; `etude resume RUN` continues from it, bit for bit, on any "
    "number of ranks that divides learner.shards."
)


class Heartbeat:
    """This rank's heartbeat, and those of the other ranks."""

    def __init__(self, rank: int, size: int, store: Store, held: object) -> None:
        """`held` is kept for good where the rank ends early: torch's process group waits in its
        destructor for exchanges, and some of them never end."""
        self.rank, self.size = rank, size
        self.exchanges = 0
        """How many this rank has begun."""
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
        """Give no more signs of life. The thread must not be in the store when Python ends."""
        self._ends.set()
        self._wake.set()
        if self._has_store:
            self._rests.wait(GONE)
        if self._note is None:
            self._thread.join(GONE)

    def leave(self, error: BaseException) -> None:
        """Tell the others why this rank ends, which they may not know."""
        self._note = _note(error, self.rank)
        self._wake.set()
        if self._has_store:
            _wait(lambda: self._is_noted, GONE)
        if self.rank == 0:  # The store may end with this process: who lives shall have read it.
            others = set(range(1, self.size))
            _wait(lambda: others <= {*self._notes, *self._silent(GONE)}, 2 * GONE)
        self.stop()

    def check(self, patience: float) -> None:
        """Raise what another rank has ended with, or that one has been silent for so long.

        To be called once in every BEAT by whoever waits: time is counted in calls where the store
        itself says nothing, since a process that was frozen finds its clocks far ahead.
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
        """Raise the reason why an exchange broke, once that is known, or after so long."""
        for _ in range(int(seconds / BEAT)):
            self.check(GONE)
            time.sleep(BEAT)
        behind = [r for r, count in enumerate(self._exchanges) if count < self.exchanges]
        missing = f": {named(behind)} did not come" if behind else ""
        raise LostRank(
            f"An exchange between ranks broke, though all of them live{missing} "
            f"({describe(error)}). {CONTINUE}"
        ) from error

    @property
    def _has_store(self) -> bool:
        """Whether the store has answered lately."""
        return self._unanswered * BEAT < GONE

    def _silent(self, seconds: float) -> list[int]:
        return [r for r, heard in enumerate(self._heard) if self._polled - heard >= seconds]

    def _run(self, store: Store, held: object) -> None:
        count = 0
        with suppress(RuntimeError):  # The store is gone: what was heard last is what is known.
            while not self._ends.is_set():
                count += 1
                with suppress(DistStoreError):  # Somebody is not there yet.
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
    """An error as plain data."""
    code = int(getattr(error, "exit_code", EtudeError.exit_code))
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, NonFinite):
        note = encode([code, "", trace, error.where, error.arrays])
        return note if len(note) <= LARGEST_NOTE else encode([code, "", trace, error.where, {}])
    if isinstance(error, LostRank):
        return encode([code, str(error), "", None, {}])
    text = str(error) if isinstance(error, EtudeError) else f"{describe(error)}."
    return encode([code, f"Rank {rank} failed: {text}", trace, None, {}])


def _error(rank: int, note: bytes) -> EtudeError:
    """What a note tells."""
    code, text, trace, where, arrays = decode(note)
    if where is not None:
        error: EtudeError = NonFinite(where, arrays)
    else:
        error = EtudeError(text) if trace else LostRank(text)
    error.exit_code = code
    error.add_note(f"On rank {rank}:\n{trace}")
    return error

"""The failure record of a group: the first failure that any rank writes is what every rank reports."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum

from tpoverlap.comm.layout import FAILURE_LENGTH, FAILURE_STATE, FAILURE_TEXT, FAILURE_TEXT_BYTES
from tpoverlap.comm.segment import Segment
from tpoverlap.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpOverlapError,
)


class FailureKind(StrEnum):
    LOST = "lost"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    MISMATCH = "mismatch"


_ERRORS: dict[FailureKind, type[TpOverlapError]] = {
    FailureKind.LOST: PeerLostError,
    FailureKind.TIMEOUT: CollectiveTimeoutError,
    FailureKind.ABORTED: CollectiveAbortedError,
    FailureKind.MISMATCH: CollectiveMismatchError,
}


@dataclass(frozen=True)
class Failure:
    """What failed. rank: the culprit; reporter: who found it; call: the reporter's call, with what it was; run: how
    many runs of an executor the reporter had begun."""

    kind: FailureKind
    rank: int
    reporter: int
    call: int
    operation: str
    detail: str
    run: int = 0

    @property
    def resettable(self) -> bool:
        return self.kind is not FailureKind.LOST

    def error(self, group: str) -> TpOverlapError:
        where = f"during call {self.call} ({self.operation})" if self.operation else f"after call {self.call}"
        todo = "reset() on all ranks makes it work again" if self.resettable else "destroy it and start the ranks anew"
        return _ERRORS[self.kind](f"group {group!r}: {self.detail} {where}, as rank {self.reporter} found; {todo}")


class FailureRecord:
    """Reads and writes the record in the segment's header. Any thread of any rank may use it."""

    # A holder of the lock may have been stopped in the middle of the few microseconds that it takes.
    _LOCK_PATIENCE_S = 0.1

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._threads = threading.RLock()  # a signal handler may ask, too

    @property
    def present(self) -> bool:
        return self._segment.words[FAILURE_STATE // 4] != 0

    def write(self, failure: Failure, over_resettable: bool = False) -> None:
        """Writes ``failure`` unless the record holds one already, or one that no reset can mend."""
        text = json.dumps(asdict(failure)).encode()
        if len(text) > FAILURE_TEXT_BYTES:
            text = json.dumps(asdict(failure) | {"detail": failure.detail[:500]}).encode()
        segment = self._segment
        with self._locked():
            present = self._read()
            if present is None or (over_resettable and present.resettable):
                segment.words[FAILURE_STATE // 4] = 0
                segment.bytes[FAILURE_TEXT : FAILURE_TEXT + len(text)] = text
                segment.words[FAILURE_LENGTH // 4] = len(text)
                segment.words[FAILURE_STATE // 4] = 1

    def read(self) -> Failure | None:
        if not self.present:
            return None
        with self._locked():  # in a reset the loss of a peer may take the place of what stands here
            return self._read()

    def clear(self, condition: Callable[[], bool]) -> bool:
        """Forgets the failure if ``condition`` holds under the record's lock; returns whether it has."""
        with self._locked() as locked:
            if not locked or not condition():
                return False
            self._segment.words[FAILURE_STATE // 4] = 0
            return True

    def _read(self) -> Failure | None:
        if not self.present:
            return None
        length = self._segment.words[FAILURE_LENGTH // 4]
        fields = json.loads(bytes(self._segment.bytes[FAILURE_TEXT : FAILURE_TEXT + length]))
        return Failure(**fields | {"kind": FailureKind(fields["kind"])})

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yields whether the lock could be had."""
        # Record locks keep processes apart, not the threads of one.
        with self._threads:
            locked = self._lock()
            try:
                yield locked
            finally:
                if locked:
                    fcntl.lockf(self._segment.fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        give_up = time.monotonic() + self._LOCK_PATIENCE_S
        while True:
            try:
                fcntl.lockf(self._segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.001)

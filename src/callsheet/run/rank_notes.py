"""The notes that the ranks of a run leave for each other in the rendezvous store, to find the rank at fault after a failure."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable

from torch import distributed

from callsheet.run.store import within

LOOK_SECONDS = 0.5
"""The longest interval at which a rank checks whether another rank has asked a question in the rendezvous store."""

TIMED_OUT, CUT_OFF, FAILED, LEFT, GAVE_UP = "timed out", "cut off", "failed", "left", "gave up"
LOST_LOCK = "lost the lock"
"""The kinds of notes that a rank leaves in the rendezvous store when it ends; see `RankNotes`."""


class RankNotes:
    """The messages that the ranks of one run leave for each other in the rendezvous store.

    The messages say why a rank has ended, and which ranks still run.

    Args:
        prefix: the prefix of this run's keys in the store; the same on all its ranks, and different for every run and attempt.
    """

    def __init__(self, prefix: str, rank: int, seconds: float) -> None:
        self._prefix, self._rank, self._seconds = prefix, rank, seconds
        self.is_silent = not prefix
        """Whether the store has failed to answer an earlier call, so that no further call is made."""
        self._has_left = False
        self._kinds: set[str] = set()

    def ask(self, act: Callable[[], str]) -> str:
        """Return the result of `act()`, which uses the rendezvous store. Raise TimeoutError if the store does not answer.

        Raises:
            TimeoutError: the store does not answer, or failed to answer an earlier call.
            RuntimeError: the store has ended.
        """
        if self.is_silent:
            raise TimeoutError
        try:
            return within(self._seconds, act)
        except TimeoutError:
            self.is_silent = True
            raise

    def leave(self, kind: str, word: str) -> None:
        """Write to the rendezvous store why this rank ends.

        Only the first call has an effect, because its reason is closest to the cause.

        Errors of the store are ignored: this rank is ending in any case, and must report its own error.
        """
        if not self._has_left:
            self._has_left = True
            with contextlib.suppress(RuntimeError, ValueError, TimeoutError):
                self.ask(lambda: self._set(f"gone/{self._rank}", json.dumps([kind, word])))

    def read(self, rank: int) -> tuple[str, str] | None:
        """Return the kind and the text of the message that `rank` wrote with `leave`; None if there is no message."""
        word = self._get(f"gone/{rank}")
        if word is None:
            return None
        kind, text = json.loads(word)
        self._kinds.add(kind)
        return kind, text

    def has_read_of(self, kind: str) -> bool:
        """Return whether `read` has found, on any rank, a message of this kind, such as `FAILED`."""
        return kind in self._kinds

    def question(self) -> None:
        """Ask all ranks, through the rendezvous store, whether they still run."""
        self._set("who", "")

    def is_asked(self) -> bool:
        """Return whether any rank has called `question` to find out which ranks still run."""
        return self._get("who") is not None

    def answer(self) -> None:
        """Write to the rendezvous store that this rank still runs, in answer to `question`."""
        self._set(f"here/{self._rank}", "")

    def has_answered(self, rank: int) -> bool:
        """Return whether `rank` has answered that it still runs."""
        return self._get(f"here/{rank}") is not None

    def _get(self, key: str) -> str | None:
        store = distributed.distributed_c10d._get_default_store()
        return store.get(f"{self._prefix}/{key}").decode() if store.check([f"{self._prefix}/{key}"]) else None

    def _set(self, key: str, word: str) -> str:
        distributed.distributed_c10d._get_default_store().set(f"{self._prefix}/{key}", word)
        return word


class RankPresence:
    """A thread that answers for this rank when another rank asks which ranks still run.

    A rank asks after its collective has failed. A thread answers, because this rank's main thread may be blocked in a collective.
    """

    def __init__(self, notes: RankNotes, pause: float) -> None:
        self._is_over = threading.Event()
        self._notes = notes
        self._thread = threading.Thread(target=self._run, args=(notes, pause), name="callsheet-presence", daemon=True)
        self._thread.start()

    def _run(self, notes: RankNotes, pause: float) -> None:
        # RuntimeError or ValueError: the store or the process group has ended, so no rank can ask whether this rank still runs.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._is_over.wait(pause):
                if notes.is_asked():
                    notes.answer()
                    return

    def end(self) -> None:
        """End the thread. Do not wait for it if the store does not answer."""
        self._is_over.set()
        if not self._notes.is_silent:  # wait for the thread only if the store answers: otherwise the thread may hang in a call
            self._thread.join(LOOK_SECONDS)

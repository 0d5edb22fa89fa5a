"""Agreement: what one rank asks for is known to all of them at the same step, without any of them waiting."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from callsheet.control import Control, Request
from callsheet.errors import DistributedError
from callsheet.signals import SignalWatch
from callsheet.trainer.process_groups import Pending, ProcessGroups

PERIOD_SECONDS = 0.1
"""About so often a word goes round, counted in steps: fewer would let a request wait, more would cost the step."""
LONGEST_PERIOD = 1000  # steps


class Agreement:
    """Sends a word round the ranks every so many steps, and makes what it says come true on all of them at one boundary.

    The word is five integers, MAX-reduced on a group of its own: begun at one step, read at a fixed later one. When it says that a rank
    asks for something, all ranks exchange their requests. Every step of training or evaluation counts, and ranks that do not count
    the same fail, since they would wait for each other in different places. With one rank everything is known at once.

    `signal` is the signal that all ranks know of; `published` how many asynchronous checkpoints are durable, as all ranks know.

    Raises, wherever it waits:
        DistributedError: a rank does not answer, or is at another step.
    """

    def __init__(self, world: ProcessGroups, control: Control, signals: SignalWatch) -> None:
        self._next = 0  # the count at which to read
        self._steps = 0  # of training and evaluation
        self._evaluated = 0  # those of evaluation
        self.published = 0
        self.durable: Callable[[], int] = lambda: 0
        """How many asynchronous checkpoints are over on this rank."""
        self._signal: signal.Signals | None = None
        self._world = world
        self._control = control
        self._signals = signals
        self._pending: Pending | None = None
        self._period = 1
        self._sent = (0, 0.0)  # the step and time of the last word

    @property
    def signal(self) -> signal.Signals | None:
        """The signal to make way that all ranks know of."""
        return self._signals.received if self._world.size == 1 else self._signal

    @property
    def seconds_left(self) -> float:
        """Of the grace period, once a signal has come to any rank: who got none is killed with the others."""
        return min(self._signals.seconds_left, self._signals.grace)

    @property
    def next_step(self) -> int:
        """The training step after which `look` has something to do; before that it need not be called."""
        return sys.maxsize if self._world.size == 1 else self._next - self._evaluated

    def look(self, step: int) -> None:
        """After training step `step`: read the word that is due, and send the next."""
        if self._world.size == 1:
            self.published = self.durable()
            return
        self._steps = step + self._evaluated
        if self._steps >= self._next:
            self._read()
            self._send()
            if not self._period:  # a step takes longer than the word may: waiting for it costs less than being a step late
                self._read()

    def evaluated_step(self, step: int) -> None:
        """The same after a step of evaluation, which counts like one of training."""
        self._evaluated += 1
        self.look(step)

    def settle(self, step: int) -> None:
        """At a point that all ranks reach: wait for the word under way, then for one more, so that nothing is left unsaid."""
        if self._world.size == 1:
            self.published = self.durable()
            return
        self._steps = step + self._evaluated
        self._read()
        self._send()
        self.change_pace()

    def change_pace(self) -> None:
        """At a point that all ranks reach: the steps that follow may be slower by far, so begin with a word at each of them again."""
        self._read()
        self._period, self._next, self._sent = 1, self._steps + 1, (0, 0.0)

    def _send(self) -> None:
        asks = bool(self._control.local_requests) or (self._signals.received is not None and self._signal is None)
        period = self._measured_period() if self._world.rank == 0 else 0
        self._pending = self._world.begin_max([asks, self._steps, -self._steps, -self.durable(), period])
        self._next = self._steps + max(1, self._period)

    def _measured_period(self) -> int:
        """How many steps `PERIOD_SECONDS` are, by those since the last word, 0 where a step is longer; rank 0's is everybody's."""
        (step, moment), self._sent = self._sent, (self._steps, time.monotonic())
        steps, seconds = self._steps - step, self._sent[1] - moment
        if not moment or not steps:
            return self._period
        return min(LONGEST_PERIOD, int(steps * PERIOD_SECONDS / seconds)) if seconds else LONGEST_PERIOD

    def _read(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        asks, last, first, published, period = pending.wait(lambda: self._deadline(began))
        if last != -first:
            steps = self._world.gather(self._steps)
            raise DistributedError(
                f"the ranks are not at the same step: {', '.join(f'rank {rank} at {step}' for rank, step in enumerate(steps))}; "
                "do all of them get the same number of batches?"
            )
        self._period = int(period)
        self.published = int(-published)
        if asks:
            self._exchange()

    def _exchange(self) -> None:
        """Rare: everybody tells everything, and takes it in the order of ranks."""
        received = self._signals.received
        told: list[tuple[list[Request], int]] = self._world.gather((self._control.take_requests(), int(received or 0)))
        for wishes, number in told:
            for request in wishes:
                self._control.agree(request)
            if number and self._signal is None:
                self._signal = signal.Signals(number)

    def _deadline(self, began: float) -> float:
        """A launcher sends its signal to all ranks, and after a peer's death too: who does not answer then will not answer at all.

        It counts from the signal, or from where the waiting began: a checkpoint in between may have taken as long.
        """
        arrived, grace = self._signals.arrived_at, self._signals.grace
        return max(arrived, began) + grace / 3 if arrived is not None else float("inf")

"""If one rank makes a request, such as to stop, all ranks carry it out at the same step. The ranks rarely wait for each other."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from callsheet.core.control import Control, Request
from callsheet.errors import DistributedError
from callsheet.run.process_groups import Pending, ProcessGroups
from callsheet.run.signals import SignalWatch

PERIOD_SECONDS = 0.25
"""About how many seconds pass between two messages to the other ranks. The value is converted to a number of steps.

A longer time delays requests. A shorter one slows the steps: if the ranks use all CPU cores, a message takes up to a
millisecond.
"""
MAX_PERIOD_STEPS = 1000  # the maximum number of steps between two messages to the other ranks


class Agreement:
    """Exchanges a message between the ranks every few steps, so that all ranks carry out requests after the same step.

    The message is five integers, reduced with MAX on a process group of its own. The reduction begins at one step, and its result
    is read at a fixed later step. If the result says that a rank has a request, all ranks exchange their requests. Steps of
    training and of evaluation all count. Ranks whose counts differ raise an error, because they would wait for each other in
    different places. With one rank nothing is exchanged.

    `signal` is the preemption signal that all ranks know of. `published` is the number of background checkpoints that are durable
    on all ranks.

    Raises, in every method that waits: DistributedError: a rank does not answer, or is at another step.
    """

    def __init__(self, groups: ProcessGroups, control: Control, signals: SignalWatch) -> None:
        self._next = 0  # the value of `_steps` at which to read the other ranks' messages
        self._steps = 0  # the number of training and evaluation steps so far
        self._evaluated = 0  # the number of evaluation steps so far
        self.published = 0
        self.durable: Callable[[], int] = lambda: 0
        """A function that returns how many background checkpoints this rank has finished writing."""
        self._signal: signal.Signals | None = None
        self._groups = groups
        self._control = control
        self._signals = signals
        self._pending: Pending | None = None
        self._period = 1
        self._sent = (0, 0.0)  # the value of `_steps` at the last message, and the time of the last message

    @property
    def signal(self) -> signal.Signals | None:
        """The preemption signal that some rank has received and all ranks know of; None if there is none."""
        return self._signals.received if self._groups.size == 1 else self._signal

    @property
    def seconds_left(self) -> float:
        """How many seconds remain until the launcher kills the ranks. Valid only if a rank has received a preemption signal.

        The launcher then kills all ranks, including those that received no signal.
        """
        return min(self._signals.seconds_left, self._signals.grace)

    @property
    def next_step(self) -> int:
        """The training step after which the loop must call `look` next."""
        return sys.maxsize if self._groups.size == 1 else self._next - self._evaluated

    def end(self) -> None:
        """Discard the unfinished exchange of a message, because the exchange keeps the connections to the other ranks open."""
        self._pending = None

    def look(self, step: int) -> None:
        """If an exchange is due after training step `step`, read the messages of the other ranks and send this rank's next message."""
        if self._groups.size == 1:
            self.published = self.durable()
            return
        self._steps = step + self._evaluated
        if self._steps >= self._next:
            self._read()
            self._send()
            # If a step is long, wait for the messages of the other ranks now, because after the next step they would be read too late.
            if not self._period:
                self._read()

    def look_in_evaluation(self, step: int) -> None:
        """Exchange requests with the other ranks after a step of evaluation, as `look` does after a training step."""
        self._evaluated += 1
        self.look(step)

    def agree(self, step: int) -> None:
        """Wait for the exchange of messages in progress, and for one more exchange, so that all ranks know all requests.

        All ranks must call this at the same point.
        """
        if self._groups.size == 1:
            self.published = self.durable()
            return
        self._steps = step + self._evaluated
        self._read()
        self._send()
        self.change_pace()

    def change_pace(self) -> None:
        """Exchange a message at every step for now, because the next steps may be much slower than the steps measured so far.

        All ranks must call this at the same point.
        """
        self._read()
        self._period, self._next, self._sent = 1, self._steps + 1, (0, 0.0)

    def _send(self) -> None:
        asks = bool(self._control.local_requests) or (self._signals.received is not None and self._signal is None)
        period = self._measure_period() if self._groups.rank == 0 else 0
        self._pending = self._groups.begin_max([asks, self._steps, -self._steps, -self.durable(), period])
        self._next = self._steps + max(1, self._period)

    def _measure_period(self) -> int:
        """Return the number of steps that fit into `PERIOD_SECONDS`, as measured since the last message; 0 if not even one fits.

        All ranks use the result of rank 0.
        """
        (step, moment), self._sent = self._sent, (self._steps, time.monotonic())
        steps, seconds = self._steps - step, self._sent[1] - moment
        if not moment or not steps:
            return self._period
        due = steps * PERIOD_SECONDS / seconds if seconds else MAX_PERIOD_STEPS
        return 0 if due < 1 else min(MAX_PERIOD_STEPS, round(due))

    def _read(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        asks, last, first, published, period = pending.wait(lambda: self._deadline(began))
        if last != -first:
            steps = self._groups.gather(self._steps)
            raise DistributedError(
                f"the ranks are not at the same step: {', '.join(f'rank {rank} at {step}' for rank, step in enumerate(steps))}; "
                "do all of them get the same number of batches?"
            )
        self._period = int(period)
        self.published = int(-published)
        if asks:
            self._exchange()

    def _exchange(self) -> None:
        """Exchange the requests and signals of all ranks, and apply them in the order of ranks.

        This happens only if a rank has a request or has received a signal.
        """
        received = self._signals.received
        of_ranks: list[tuple[list[Request], int]] = self._groups.gather((self._control.take_requests(), int(received or 0)))
        for requests, number in of_ranks:
            for request in requests:
                self._control.agree(request)
            if number and self._signal is None:
                self._signal = signal.Signals(number)

    def _deadline(self, began: float) -> float:
        """Return the time until which to wait for the other ranks; infinite if no preemption signal has arrived.

        A launcher signals all ranks even after one of them has died. So a rank that does not answer by this time is taken for dead.

        The time counts from the signal or from the start of the waiting, whichever is later: a checkpoint that is written between
        the two takes time too.
        """
        arrived, grace = self._signals.arrived_at, self._signals.grace
        return max(arrived, began) + grace / 3 if arrived is not None else float("inf")

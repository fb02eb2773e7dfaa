"""All ranks stop at the same step, whoever was asked: a flag that travels beside training, and nobody waits for."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from bireme.channel import new_side_group, set_group_timeout
from bireme.shutdown import StopRequest

LOOK_EVERY_S = 1.0  # a look at every short step would be felt; steps that take longer are looked at one by one
_LONG_STEP_S = 2.0  # from here on a boundary waits for its own answer: one more step would cost more than the wait
_MOST_BOUNDARIES = 10
_STUCK_AFTER_S = 6.0  # two looks, two steps, and what a busy machine adds


class CommonStop:
    """Whether to stop, the same on every rank at the same boundary; made and called by all of them alike.

    About once a second `poll` starts a tiny all-reduce (of the signal, and of how long steps take) and reads the answer
    of the one before: that is complete, as no rank gets through a step without the others. What is read is the same
    everywhere, and so is when the next look comes. A rank's signal stops all of them within two looks, and where steps
    are long at the end of the one it came in.
    """

    def __init__(self, request: StopRequest, ranks: int):
        self.step_s = 0.0  # what a step takes on this rank; set by the loop
        self._request = request
        self._group = new_side_group() if ranks > 1 else None
        self._answer: tuple[Any, torch.Tensor] | None = None
        self._agreed = 0
        self._boundaries_left = 0
        self._long = False

    def poll(self) -> int:
        """The signal that all ranks stop for, or 0."""
        if self._agreed:
            return self._agreed
        self._request.stuck_after_s = max(_STUCK_AFTER_S, 3 * self.step_s)
        if self._group is None:
            self._settle(self._request.signal)
            return self._agreed
        self._boundaries_left -= 1
        if self._boundaries_left > 0:
            return 0
        before, self._answer = self._answer, self._ask()
        if self._long:
            self._read(self._answer)
        elif before is not None:
            self._read(before)
        return self._agreed

    def set_timeout(self, timeout_s: float) -> None:
        if self._group is not None:
            set_group_timeout(timeout_s, self._group)

    def patiently(self) -> AbstractContextManager[None]:
        """Around what may take long for a reason: a rank in it is not taken for stuck."""
        return self._request.patiently()

    def close(self) -> None:
        """Waits for the last answer: nothing may be under way when the process group ends."""
        if self._answer is not None:
            self._answer[0].wait()
            self._answer = None

    def _ask(self) -> tuple[Any, torch.Tensor]:
        asked = torch.tensor([float(self._request.signal), self.step_s], dtype=torch.float64)
        return dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group, async_op=True), asked

    def _read(self, answer: tuple[Any, torch.Tensor]) -> None:
        work, values = answer
        work.wait()
        signal_number, longest_step_s = values.tolist()
        self._long = longest_step_s >= _LONG_STEP_S
        # Never far ahead: the first step's time is not known yet, and later ones may be longer than those before.
        steps = LOOK_EVERY_S / longest_step_s if longest_step_s > 0 else 1.0
        self._boundaries_left = int(min(max(1.0, steps), _MOST_BOUNDARIES))
        self._settle(int(signal_number))

    def _settle(self, signal_number: int) -> None:
        if signal_number:
            self._agreed = signal_number
            self._request.agreed(signal_number)

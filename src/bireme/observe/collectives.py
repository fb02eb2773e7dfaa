"""Sees every collective of the observed process groups: when it was issued, when it finished, who waited for it.

One pre hook and one post hook on each group (torch 2.14) see eager, asynchronous and functional collectives, DDP's
reducer, FSDP2 and DTensor. `Work.wait`, and `wait_tensor` of functional collectives (DTensor's), are replaced while
observing: they show every wait made from Python, and the finish of works that have no future (reduce-scatter, send and
receive on gloo).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import Work

try:
    from torch._C._distributed_c10d import HookOpName
except ImportError:  # before torch 2.14
    HookOpName = None  # type: ignore[misc, assignment]

from bireme.channel import SIDE_GROUP
from bireme.ledger import EAGER, IN_PLACE, REDUCER, Span
from bireme.observe.position import MOST_GROUPS, Position

_HOOK_ID = 0x62697265  # "bire": hook ids are ints, and the user may have hooks of their own

# A work that nobody ever waits for is not kept alive for ever: it holds its tensors.
_MOST_WAITED_FOR = 1024

OPERATIONS = {
    "SEND": "send",
    "RECV": "receive",
    "BROADCAST": "broadcast",
    "ALLREDUCE": "all_reduce",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "BARRIER": "barrier",
    "GATHER": "gather",
    "SCATTER": "scatter",
}

OPERATION_NAMES = tuple(OPERATIONS.values())
_NUMBER_OF = {operation: number for number, operation in enumerate(OPERATION_NAMES)}

_OPERATION_OF = (
    {int(getattr(HookOpName, name)): operation for name, operation in OPERATIONS.items()}
    if HookOpName is not None
    else {}
)


def hooks_missing() -> str | None:
    """Why collectives cannot be seen, or None."""
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        return "this PyTorch has no process-group hooks (they came with 2.14): transfer and wait cannot be told apart"
    return None


def process_groups() -> list[Any]:
    """The distinct process groups that this rank is a member of, in the order they were made.

    A one-dimensional mesh's group *is* the world group: hooks registered twice would count everything twice. Bireme's
    own side groups are left out.
    """
    from torch.distributed import distributed_c10d

    groups = dict.fromkeys(distributed_c10d._world.pg_map)
    return [group for group in groups if getattr(group, "group_desc", None) != SIDE_GROUP]


class CollectiveObserver:
    """Collects a Span for each collective issued on `groups` ({index in the run's table: group}).

    Hook bodies never raise into the user's loop: the first error is kept in `failure` and observing goes quiet.
    The training thread is the one that makes the observer; the monitor renews `step`. `position` is told what is issued
    and finished.
    """

    def __init__(self, groups: dict[int, Any], position: Position | None = None):
        self.step = 1
        self._position = position
        self._blocked: Span | None = None  # what the training thread waits for in Python
        self.overhead_ns = 0  # spent in hook bodies on the training thread since the last `take`
        self.failure: str | None = None
        self._issued: list[Span] = []
        self._waited_for: dict[int, tuple[Any, Span]] = {}  # id(work): the work is kept alive, its id cannot recur
        self._without_future: set[tuple[int, str]] = set()
        self._outputs: dict[int, Span] = {}  # functional collectives by the address of what they fill
        self.thread = threading.get_ident()
        self.paused = False  # what is issued meanwhile is nobody's
        self._groups = dict(groups)
        for index, group in groups.items():
            self._register(index, group, position)
        _observe_waits(self)

    def add(self, index: int, group: Any) -> None:
        """A group that was made later; the hang watch does not know it."""
        self._groups[index] = group
        self._register(index, group, None)

    def drop(self, group: Any) -> None:
        """A group that was destroyed."""
        self._groups = {index: each for index, each in self._groups.items() if each is not group}

    def take(self) -> list[Span]:
        """The spans issued since the last call."""
        issued, self._issued = self._issued, []
        return issued

    def close(self) -> None:
        _stop_observing_waits(self)
        for group in self._groups.values():
            # Fails when the group was destroyed first: then its hooks went with it.
            with suppress(Exception):
                group.unregister_pre_hook(_HOOK_ID)
                group.unregister_post_hook(_HOOK_ID)
        self._groups = {}
        self._waited_for.clear()
        self._outputs.clear()

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"

    def _register(self, index: int, group: Any, position: Position | None) -> None:
        # What follows runs between matrix multiplications, with cold caches: every Python operation there costs a
        # microsecond or more (a collective cost 140 us, hot 12). So: few operations, and none that can be done later.
        open_span: Span | None = None  # between the two hooks of one collective
        sequence = 0
        size = group.size()
        now_ns = time.perf_counter_ns
        note_issue = self._note_issue
        waited_for = self._waited_for
        outputs = self._outputs

        def before(args: Any) -> None:
            nonlocal sequence, open_span
            entered_ns = now_ns()
            try:
                open_span = None
                operation = _OPERATION_OF.get(int(args.name))
                if operation is None:
                    return
                num_bytes = 0
                for tensor in args.input_tensors:
                    num_bytes += tensor.nbytes
                number = root = -1
                if operation != "all_reduce":
                    num_bytes = _whole_bytes(operation, num_bytes, args.output_tensors, size)
                    root = args.root
                if operation != "send" and operation != "receive":
                    number = sequence
                    sequence += 1
                if self.paused:
                    if position is not None and number >= 0:  # for the hang watch this rank moves all the same
                        position.issued(index, number, _NUMBER_OF[operation], num_bytes)
                        position.finished(index, number)
                    return
                try:
                    code = _caller(1).f_code
                    known = _origins.get(id(code))
                    origin = known[0] if known is not None else _origin(code)
                except ValueError:  # no Python below: autograd's own thread, on a GPU
                    origin = REDUCER
                open_span = Span(index, number, operation, num_bytes, entered_ns, None, origin, root, self.step)
                if note_issue is not None:
                    note_issue(open_span)
                self._issued.append(open_span)
                if position is not None and number >= 0:
                    position.issued(index, number, _NUMBER_OF[operation], num_bytes)
                if origin is IN_PLACE:
                    for tensor in args.output_tensors or args.input_tensors:  # an all-reduce fills its input
                        outputs[tensor.data_ptr()] = open_span
                    if len(outputs) > _MOST_WAITED_FOR:
                        outputs.pop(next(iter(outputs)), None)
            except Exception as error:
                self._fail(error)
            self.overhead_ns += now_ns() - entered_ns

        def after(args: Any) -> None:
            entered_ns = now_ns()
            try:
                span = open_span
                if span is not None and (work := args.work) is not None:
                    if span.origin is not REDUCER:  # which waits in C++
                        waited_for[id(work)] = (work, span)
                        if len(waited_for) > _MOST_WAITED_FOR:
                            waited_for.pop(next(iter(waited_for)), None)
                    self._follow(work, span, args.async_op, position)
            except Exception as error:
                self._fail(error)
            self.overhead_ns += now_ns() - entered_ns

        group.register_pre_hook(_HOOK_ID, before)
        group.register_post_hook(_HOOK_ID, after)

    # What a device needs to note when a collective is issued; on a CPU the span's `issue_ns` is all.
    _note_issue: Callable[[Span], None] | None = None

    # The moment that a wait begins or ends, for `_note_wait`.
    wait_begins: Callable[[], Any] = staticmethod(time.perf_counter_ns)

    def _follow(self, work: Any, span: Span, async_op: bool, position: Position | None) -> None:
        """Notes the finish when the work's future is done: on one of gloo's threads, as soon as it gets the GIL."""
        if not async_op:
            return  # the caller waits at once, and the end of that wait is the finish
        future = None
        if (span.group, span.operation) not in self._without_future:
            try:
                future = work.get_future()
            except RuntimeError:  # an error with a C++ stack is slow to make: asked once only
                self._without_future.add((span.group, span.operation))
        if future is None:
            # Reduce-scatter, send, receive on gloo: the caller's own wait shows the finish, unless it is made in C++.
            span.seen = span.origin == EAGER
            if not span.seen:
                self._waited_for.pop(id(work), None)
            return
        key = id(work) if span.origin is not REDUCER else None
        # Nothing below leads to the process group: were the last reference to it dropped there, on one of its own
        # threads, it would wait for that thread to end ("Resource deadlock avoided", and the process aborts).
        waited_for = self._waited_for

        def finished(_: Any) -> None:
            if span.finish_ns is None:
                span.finish_ns = time.perf_counter_ns()
            if key is not None:
                waited_for.pop(key, None)
            if position is not None and span.sequence >= 0:
                position.finished(span.group, span.sequence)

        future.add_done_callback(finished)

    def waited(self, work: Any, start: Any) -> None:
        """The training thread has waited in Python for `work`, from `start` until now."""
        try:
            known = self._waited_for.pop(id(work), None)
            if known is not None:
                self._note_wait(known[1], start, self.wait_begins())
        except Exception as error:
            self._fail(error)

    def waited_for_output(self, tensor: Any, start: Any) -> None:
        """The training thread has waited in Python for the functional collective that fills `tensor`."""
        try:
            span = self._outputs.pop(tensor.data_ptr(), None)
            if span is not None:
                self._note_wait(span, start, self.wait_begins())
                span.seen = True
        except RuntimeError:  # a tensor without memory, such as a compiler's: nothing was waited for
            return
        except Exception as error:
            self._fail(error)

    def _note_wait(self, span: Span, start_ns: Any, end_ns: Any) -> None:
        span.waits.append((start_ns, end_ns))
        # The future's callback may come later than the waiting thread: the earlier of the two is the finish.
        if span.finish_ns is None or end_ns < span.finish_ns:
            span.finish_ns = end_ns

    # --- for who asks where this rank is ---

    def _blocks(self, span: Span | None) -> None:
        if self._position is not None and span is not None and span.group < MOST_GROUPS:
            self._blocked = span
            try:
                self._position.waits(_NUMBER_OF[span.operation], span.group, span.side)
            except Exception as error:
                self._fail(error)

    def blocks(self, work: Any) -> None:
        """The training thread begins to wait in Python for `work`."""
        known = self._waited_for.get(id(work))
        self._blocks(known[1] if known is not None else None)

    def blocks_on_output(self, tensor: Any) -> None:
        """The same for the functional collective that fills `tensor`."""
        with suppress(RuntimeError):  # a tensor without memory
            self._blocks(self._outputs.get(tensor.data_ptr()))

    def goes_on(self) -> None:
        """A wait has ended; not called after one that failed: there the rank stays, for whoever asks."""
        span, self._blocked = self._blocked, None
        if span is not None and self._position is not None:
            self._position.no_wait()
            if self.waits_to_the_end and span.sequence >= 0:
                self._position.finished(span.group, span.sequence)

    # On a GPU a wait ends when the work is queued.
    waits_to_the_end = True


def _whole_bytes(operation: str, in_bytes: int, outputs: list[Any], size: int) -> int:
    """The whole tensor's bytes, the same on every member: of a gather and a scatter most hold only their part."""
    out_bytes: int = sum(tensor.nbytes for tensor in outputs)
    if operation == "gather":
        return in_bytes * size
    if operation == "scatter":
        return out_bytes * size
    return max(in_bytes, out_bytes)


_caller = sys._getframe
_origins: dict[int, tuple[str, CodeType]] = {}  # by id, of code that is kept alive: hashing code objects is slow


def _origin(code: CodeType) -> str:
    """Who issues a collective, from the Python code that entered C++ (a hook's caller).

    torch.distributed's own functions wait in Python; autograd's engine means DDP's reducer; anything else is a
    functional collective, which waits in `wait_tensor`, or compiled code, which waits in C++.
    """
    if code.co_name == "_engine_run_backward":
        origin = REDUCER
    elif code.co_filename.endswith("distributed_c10d.py"):
        origin = EAGER
    else:
        origin = IN_PLACE
    _origins[id(code)] = (origin, code)
    return origin


# --- waits -------------------------------------------------------------------------------------------------------

_observers: dict[int, CollectiveObserver] = {}  # by training thread; of several on one thread the latest sees waits
os.register_at_fork(after_in_child=_observers.clear)
# What was there before ours; never forgotten: a wait may be under way at any time.
_original_wait: Any = Work.wait
_original_wait_tensor: Any = functional.wait_tensor
_replaced = False


def _observed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
    observer = _observers.get(threading.get_ident())
    if observer is None:
        return _original_wait(work, *args, **kwargs)
    observer.blocks(work)
    start = observer.wait_begins()
    try:
        answer = _original_wait(work, *args, **kwargs)
        observer.goes_on()
        return answer
    finally:
        observer.waited(work, start)


def _observed_wait_tensor(tensor: Any) -> Any:
    if torch.compiler.is_compiling():  # traced into the user's own code, which must stay what it was
        return _original_wait_tensor(tensor)
    observer = _observers.get(threading.get_ident())
    if observer is None:
        return _original_wait_tensor(tensor)
    observer.blocks_on_output(tensor)
    start = observer.wait_begins()
    try:
        answer = _original_wait_tensor(tensor)
        observer.goes_on()
        return answer
    finally:
        observer.waited_for_output(tensor, start)


def unobserved_wait(work: Any) -> None:
    """`work.wait()` as PyTorch has it."""
    _original_wait(work)


def _observe_waits(observer: CollectiveObserver) -> None:
    global _original_wait, _original_wait_tensor, _replaced
    if not _replaced:
        _original_wait, _original_wait_tensor = Work.wait, functional.wait_tensor
        Work.wait = _observed_wait  # type: ignore[method-assign, assignment]
        functional.wait_tensor = _observed_wait_tensor
        _replaced = True
    _observers[observer.thread] = observer


def _stop_observing_waits(observer: CollectiveObserver) -> None:
    global _replaced
    if _observers.get(observer.thread) is observer:
        del _observers[observer.thread]
    # Where somebody has wrapped our wrapper meanwhile it has to stay: it passes every call through.
    if not _observers and Work.wait is _observed_wait and functional.wait_tensor is _observed_wait_tensor:
        Work.wait = _original_wait  # type: ignore[method-assign]
        functional.wait_tensor = _original_wait_tensor
        _replaced = False

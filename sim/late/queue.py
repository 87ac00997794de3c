"""Work that was issued and has not run: lanes, what each task comes after, and the drawn order in which tasks run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sim.explain.errors import SimError

_LIMIT = 1024  # tasks that wait at most, as a real device's launch queue is finite, too


class Lane:
    """A queue whose tasks run in order: a stream of a device, or a process group's on it.

    Attributes:
        index: Its number in the world.
        rank: Whose device it is of.
        title: Its name in messages.
        tail: The last task that was issued to it.
        issued: How many there were.
    """

    __slots__ = ("index", "issued", "rank", "tail", "title")

    def __init__(self, index: int, rank: int, title: str) -> None:
        self.index = index
        self.rank = rank
        self.title = title
        self.tail: LateTask | None = None
        self.issued = 0


class LateTask:
    """One piece of work: a kernel, a copy, a part in a collective, or nothing but a mark.

    Attributes:
        lane: Where it was issued.
        number: Its place there, from 1.
        what: Its name in messages.
        line: The user's line that has issued it.
        run: Does the work; None: there is none, or it is done.
        missing: How many tasks, or other conditions, have to come before.
        then: The tasks that wait for it.
        clock: By lane, the number of the last task that is known to come before it (or is it).
        done: Whether it has run.
    """

    __slots__ = ("clock", "done", "lane", "line", "missing", "number", "run", "then", "what")

    def __init__(self, lane: Lane, number: int, what: str, line: str, run: Callable[[], object] | None) -> None:
        self.lane = lane
        self.number = number
        self.what = what
        self.line = line
        self.run = run
        self.missing = 0
        self.then: list[LateTask] = []
        self.clock: dict[int, int] = {}
        self.done = False

    def comes_after(self, lane: int, number: int) -> bool:
        """Whether a task, given by lane and number, is known to have run before this one begins."""
        return self.clock.get(lane, 0) >= number


class LateQueue:
    """All tasks of a world that wait to run.

    Nothing runs before a wait for it. Then the lanes are put into an order that is drawn, and of the tasks that
    may run, the one of the first lane does, again and again. So one lane may be far ahead of another, or far behind.

    >>> queue = LateQueue(seed=1)
    >>> done = []
    >>> copying, computing = queue.new_lane(0, "copies"), queue.new_lane(0, "kernels")
    >>> copied = queue.put(copying, "copy", "", lambda: done.append("copy"))
    >>> added = queue.put(computing, "add", "", lambda: done.append("add"), after=[copied])
    >>> queue.finish(added)
    >>> done
    ['copy', 'add']

    Args:
        seed: Fixes the order.
        within: The context in which tasks run, whoever happens to issue or to wait then.
    """

    def __init__(self, seed: int, within: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._random = random.Random(seed)
        self._within = within
        self._lanes: list[Lane] = []
        self._ready: dict[LateTask, None] = {}
        self._order: dict[int, float] = {}
        self.waiting = 0
        self._moves = self.new_lane(-1, "the host")

    def new_lane(self, rank: int, title: str) -> Lane:
        """Make a lane, without tasks."""
        lane = Lane(len(self._lanes), rank, title)
        self._lanes.append(lane)
        return lane

    def lanes_of(self, rank: int) -> list[Lane]:
        """The lanes of a rank's device."""
        return [lane for lane in self._lanes if lane.rank == rank]

    def put(
        self,
        lane: Lane,
        what: str,
        line: str,
        run: Callable[[], object] | None = None,
        after: Iterable[LateTask | None] = (),
        known: dict[int, int] | None = None,
        *,
        held: bool = False,
    ) -> LateTask:
        """Issue a task: behind the lane's last one, and after those that are given.

        Args:
            lane: Where it goes.
            what: Its name in messages.
            line: The user's line.
            run: The work.
            after: What has to have run before, besides.
            known: A clock of what the host has seen to be done.
            held: It waits for `release`, too.
        """
        lane.issued += 1
        task = LateTask(lane, lane.issued, what, line, run)
        if known:
            task.clock.update(known)
        for before in (lane.tail, *after):
            if before is not None:
                self._link(before, task)
        task.clock[lane.index] = task.number
        lane.tail = task
        task.missing += held
        self.waiting += 1
        if not task.missing:
            self._ready[task] = None
        self.relieve()
        return task

    def relieve(self) -> None:
        """Run some tasks if there are too many."""
        if self.waiting > _LIMIT:
            with self._within():
                while self.waiting > _LIMIT and self._ready:
                    self._run_one()

    def put_apart(self, what: str, line: str, run: Callable[[], object], after: Iterable[LateTask]) -> LateTask:
        """Issue a task that is on no stream, and comes after those that are given only."""
        self._moves.tail = None  # there is one lane for all such tasks, which orders none of them
        return self.put(self._moves, what, line, run, after)

    def release(self, task: LateTask, after: Iterable[LateTask]) -> None:
        """Let a task that is held run after those that are given, which were not known when it was issued."""
        for before in after:
            self._link(before, task)
        task.missing -= 1
        if not task.missing:
            self._ready[task] = None

    def _link(self, before: LateTask, task: LateTask) -> None:
        if not before.done:
            before.then.append(task)
            task.missing += 1
        _learn(task, before.clock)

    def finish(self, task: LateTask) -> None:
        """Run what has to run before a task is done, and whatever the drawn order puts before that."""
        self._order.clear()
        with self._within():
            while not task.done:
                if not self._ready:
                    blame = "it waits for what nobody has issued"
                    raise SimError(f"{task.what} cannot run: {blame}\n  issued: {task.line}")
                self._run_one()

    def drain(self) -> None:
        """Run all that may run."""
        self._order.clear()
        with self._within():
            while self._ready:
                self._run_one()

    def restart(self, seed: int) -> None:
        """Draw orders anew, from another seed."""
        self._random.seed(seed)
        self._order.clear()

    def advance(self) -> None:
        """Run one task, if one may run, for a question whether something is done."""
        if self._ready:
            with self._within():
                self._run_one()

    def _run_one(self) -> None:
        order = self._order
        for each in self._ready:
            if each.lane.index not in order:
                order[each.lane.index] = self._random.random()
        task = min(self._ready, key=lambda each: order[each.lane.index])
        del self._ready[task]
        run, task.run = task.run, None
        self.waiting -= 1
        if run is not None:
            try:
                run()
            except Exception as error:
                raise SimError(
                    f"rank {task.lane.rank}'s device failed, late, in {task.what}: {error}\n"
                    f"  issued: {task.line}, on {task.lane.title}\n"
                    "  try: check_races=True, which says whether it has read what was not there yet"
                ) from error
        task.done = True
        for later in task.then:
            later.missing -= 1
            if not later.missing:
                self._ready[later] = None
        task.then = []


def _learn(task: LateTask, clock: dict[int, int]) -> None:
    """Enter into a task's clock, and into those of what comes after it, what has to come before it."""
    stack = [task]
    while stack:
        each = stack.pop()
        news = False
        for lane, number in clock.items():
            if each.clock.get(lane, 0) < number:
                each.clock[lane] = number
                news = True
        if news:
            stack += each.then

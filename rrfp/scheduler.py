"""Tasks of your own, run by readiness: the arbiter of the pipeline without the pipeline."""

import threading
import time
from collections.abc import Iterable

import torch

from rrfp import _C
from rrfp.errors import RrfpError, TaskError
from rrfp.modes import CallerModes

# A waiting thread looks at least this often for Ctrl-C.
_CLAIM_SLICE_MS = 100


class ScheduledTask:
    """A task that was added to a ``Scheduler``.

    Attributes:
        name: As given, or ``"task 3"``.
        result: What its function returned in the last run; None before.
        ready_ns, started_ns, ended_ns: When, in that run, by ``time.monotonic_ns``; None before.
    """

    def __init__(self, index, fn, name, after, stream):
        self.index = index
        self.name = name
        self.result = None
        self.ready_ns = self.started_ns = self.ended_ns = None
        self._fn = fn
        self._after = after  # tasks and names
        self._stream = stream
        self._launched = None  # where its stream was when it had been launched

    def __repr__(self):
        return f"<rrfp.ScheduledTask {self.name!r}>"


class Scheduler:
    """Runs functions as what they wait for has run; of those that are ready, the first by order.

    The order in which tasks were added is the hint, unless ``run`` is given another. Build it
    once, run it as often as you like. Threads: ``add_task``, ``on_ready`` and ``run`` are for one
    thread at a time.

    Args:
        num_threads: How many tasks run side by side; the caller's thread is one of them.
        slack: How many tasks of the order one may overtake that stand before it and have not
            begun: None for any number, 0 to take them in the order as it stands (with several
            threads, the functions of two tasks just taken may still start either way round).

    Raises:
        TypeError, ValueError: A number out of range.

    Example:
        >>> import rrfp
        >>> scheduler = rrfp.Scheduler()
        >>> load = scheduler.add_task(lambda: 20, name="load")
        >>> double = scheduler.add_task(lambda: 2 * load.result, after=[load], name="double")
        >>> [task.name for task in scheduler.run()], double.result
        (['load', 'double'], 40)
    """

    def __init__(self, num_threads=1, slack=None):
        for name, value, least in (("num_threads", num_threads, 1), ("slack", slack, 0)):
            if value is None and name == "slack":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; it must be an int.")
            if not least <= value < 2**31:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        self._num_threads = num_threads
        self._slack = _C.UNLIMITED if slack is None else slack
        self._tasks = []
        self._by_name = {}
        self._callbacks = []
        self._is_running = False

    def add_task(self, fn, after=(), stream=None, name=None):
        """Add a task; it runs once in every ``run``.

        Args:
            fn: Called without arguments, in the grad mode, autocast and default device of the
                thread that called ``run``.
            after: Tasks, or names of tasks that may be added later, that must have run before.
            stream: A ``torch.cuda.Stream`` on which its kernels are launched; it waits there for
                the kernels of what it runs after. None: the caller's current stream.
            name: Unique, for errors and ``after``.

        Returns:
            ``ScheduledTask``.

        Raises:
            TypeError, ValueError: Something that is no task, or a name that is taken.
            RrfpError: A run is under way.
        """
        self._check_idle("add_task")
        if not callable(fn):
            raise TypeError(f"fn is a {type(fn).__name__}; it must be callable.")
        if isinstance(after, (str, ScheduledTask)) or not isinstance(after, Iterable):
            raise TypeError(f"after is {after!r}; pass a list of tasks or of their names.")
        after = list(after)
        for other in after:
            if not isinstance(other, (str, ScheduledTask)):
                raise TypeError(f"after lists {other!r}; pass tasks or their names.")
            if isinstance(other, ScheduledTask) and not self._is_mine(other):
                raise ValueError(f"after lists {other!r}, a task of another scheduler.")
        if stream is not None and not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"stream is a {type(stream).__name__}; pass a torch.cuda.Stream.")
        if name is None:
            name = f"task {len(self._tasks)}"
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}; it must be a str.")
        if name in self._by_name:
            raise ValueError(f"there is a task {name!r} already; names are unique.")
        task = ScheduledTask(len(self._tasks), fn, name, after, stream)
        self._tasks.append(task)
        self._by_name[name] = task
        return task

    def on_ready(self, callback):
        """Call ``callback(task)`` when a task has become ready, before it can begin.

        It is called on the thread whose task was the last that it waited for. What it raises ends
        the run like an exception of a task.

        Raises:
            TypeError: It is not callable.
            RrfpError: A run is under way.
        """
        self._check_idle("on_ready")
        if not callable(callback):
            raise TypeError(f"callback is a {type(callback).__name__}; it must be callable.")
        self._callbacks.append(callback)

    def run(self, order=None):
        """Run every task once; blocks until all have returned. Kernels may still be running.

        Work that the caller launches afterwards on its current stream comes after that of all
        tasks.

        Args:
            order: Every task (or name) once, the preferred first. Default: as they were added.

        Returns:
            The tasks in the order in which they began.

        Raises:
            ValueError: Tasks that wait for one another in a circle, a name that does not exist,
                an order that omits or repeats a task or that the slack could not finish. Nothing
                has run.
            TaskError: A task or a callback raised.
        """
        self._check_idle("run")
        if not self._tasks:
            return []
        after = [self._resolve(task) for task in self._tasks]
        circle = _C.circle_of_tasks(after)
        if circle:
            names = [self._tasks[index].name for index in [*circle, circle[0]]]
            raise ValueError(
                f"tasks wait for one another in a circle: {' after '.join(map(repr, names))}. "
                "Remove one of these."
            )
        places = self._places(order, after)
        run = _Run(self._tasks, after, self._callbacks,
                   _C.OwnTasks(after, places, self._slack))
        self._is_running = True
        try:
            return run.finish(self._num_threads)
        finally:
            self._is_running = False

    def _check_idle(self, what):
        if self._is_running:
            raise RrfpError(f"{what} was called while the scheduler runs; wait for run() to end.")

    def _is_mine(self, task):
        return task.index < len(self._tasks) and self._tasks[task.index] is task

    def _resolve(self, task):
        """Indices of what a task waits for, ascending."""
        indices = set()
        for other in task._after:
            found = self._by_name.get(other) if isinstance(other, str) else other
            if found is None:
                raise ValueError(f"{task.name!r} runs after {other!r}, which was never added.")
            indices.add(found.index)
        if task.index in indices:
            raise ValueError(f"{task.name!r} runs after itself.")
        return sorted(indices)

    def _places(self, order, after):
        """Task indices, the preferred first, as the slack can finish them."""
        places = list(range(len(self._tasks)))
        if order is not None:
            order = list(order)
            found = [self._by_name.get(t) if isinstance(t, str) else t for t in order]
            for given, task in zip(order, found):
                if not isinstance(task, ScheduledTask) or not self._is_mine(task):
                    raise ValueError(f"order lists {given!r}, which is no task of this scheduler.")
            places = [task.index for task in found]
            if sorted(places) != list(range(len(self._tasks))):
                odd = next(t for t in self._tasks if places.count(t.index) != 1)
                raise ValueError(
                    f"order lists {odd.name!r} {places.count(odd.index)} times; it must list "
                    "every task exactly once."
                )
        if self._slack != _C.UNLIMITED:
            place_of = {index: place for place, index in enumerate(places)}
            for index, before in ((i, b) for i in places for b in after[i]):
                if place_of[before] > place_of[index]:
                    raise ValueError(
                        f"{self._tasks[index].name!r} stands before "
                        f"{self._tasks[before].name!r}, which it runs after; with slack "
                        f"{self._slack} that could wait for ever. Change the order, or use slack "
                        "None."
                    )
        return places


class _Run:
    """One run of a scheduler's tasks."""

    def __init__(self, tasks, after, callbacks, core):
        self._tasks, self._after = tasks, after
        self._callbacks, self._core = callbacks, core
        self._modes = CallerModes(forward_only=False)
        self._begun = []
        self._errors = []  # (what raised, exception); appending is atomic
        streams = [task._stream for task in tasks if task._stream is not None]
        self._caller = torch.cuda.current_stream(streams[0].device) if streams else None

    def finish(self, num_threads):
        for task in self._tasks:
            task.result = task.ready_ns = task.started_ns = task.ended_ns = None
        if self._caller is not None:
            begun = self._caller.record_event()
            for task in self._tasks:
                task._launched = begun  # what has nothing before it starts from the caller
        threads = [threading.Thread(target=self._serve, args=(True,), name=f"rrfp-task{i}")
                   for i in range(1, num_threads)]
        try:
            self._announce(self._core.first_ready())
            for thread in threads:
                thread.start()
            self._serve(False)
        finally:
            self._core.end()  # nothing is left to claim, unless this thread was interrupted
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._errors:
            name, error = self._errors[0]
            if not isinstance(error, Exception):
                raise error  # Ctrl-C, sys.exit()
            raise TaskError(
                f"{name} raised {type(error).__name__}: {error}", task=name
            ) from error
        if self._caller is not None:
            for task in self._tasks:
                self._caller.wait_event(task._launched)
        return self._begun

    def _serve(self, other_thread):
        with self._modes.adopted(other_thread):
            while True:
                index = self._core.claim(_CLAIM_SLICE_MS)
                if index == _C.OwnTasks.NOTHING:
                    continue
                if index < 0 or not self._run_task(self._tasks[index]):
                    return

    def _run_task(self, task):
        """Whether the run goes on."""
        self._begun.append(task)
        task.started_ns = time.monotonic_ns()
        try:
            autocast = self._modes.autocast()
            if autocast is None:
                task.result = self._launch(task)
            else:
                with autocast:
                    task.result = self._launch(task)
        except BaseException as error:  # in other threads nobody else would hear of it
            self._fail(task.name, error)
            return False
        task.ended_ns = time.monotonic_ns()
        return self._announce(self._core.retire(task.index))

    def _launch(self, task):
        if self._caller is None:
            return task._fn()
        stream = self._caller if task._stream is None else task._stream
        stream.wait_event(task._launched)
        for before in self._after[task.index]:
            stream.wait_event(self._tasks[before]._launched)
        with torch.cuda.stream(stream):
            result = task._fn()
        task._launched = stream.record_event()
        return result

    def _announce(self, ready):
        """Tell the callbacks of tasks that are ready, and let them be claimed."""
        for index in ready:
            task = self._tasks[index]
            task.ready_ns = time.monotonic_ns()
            for callback in self._callbacks:
                try:
                    callback(task)
                except BaseException as error:
                    self._fail(f"on_ready for {task.name}", error)
                    return False
            self._core.arrive(index)
        return True

    def _fail(self, name, error):
        self._errors.append((name, error))
        self._core.end()

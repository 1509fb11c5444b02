"""Persistent worker processes that run many cases, with a watchdog.

``WorkerGroup(n)`` starts n processes joined by torch.distributed (gloo); ``run(fn, *args)``
calls ``fn(rank, num_ranks, *args)`` in each and returns what each answered. With
``distributed=False`` there is one process that knows no torch.distributed: what a plain script
is. A group that does not answer in time has its stacks dumped, is killed, and the case fails.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait

from free_port import free_port

CASE_TIMEOUT_S = 180.0  # a busy machine is ten times slower than an idle one
START_TIMEOUT_S = 240.0
# torch, and what its optimizers, process groups and profiler import when they are first used.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch.profiler"]


@dataclass
class Answer:
    """What one process answered: a value, or the exception it ended with."""

    value: object = None
    error_type: str = ""
    error_bases: tuple = ()
    error_text: str = ""
    error_traceback: str = ""
    error_attributes: dict | None = None


def describe(error):
    """An exception as an Answer: nothing of it has to be picklable."""
    simple = {
        name: value
        for name, value in vars(error).items()
        if isinstance(value, (int, str, float, type(None)))
    }
    return Answer(
        error_type=type(error).__name__,
        error_bases=tuple(base.__name__ for base in type(error).__mro__),
        error_text=str(error),
        error_traceback="".join(traceback.format_exception(error)),
        error_attributes=simple,
    )


def serve(rank, num_ranks, port, connection, dump_path, environment):
    """Main function of a worker: runs what comes down the pipe until it is closed."""
    os.environ.clear()  # that of the server is as old as the first group
    os.environ.update(environment)
    gc.freeze()  # torch, imported before the fork: a collection would copy its pages
    dump = open(dump_path, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then kills us
    import torch

    torch.set_num_threads(1)
    if port:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
        )
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)
        function, args = request
        try:
            answer = Answer(value=function(rank, num_ranks, *args))
        except BaseException as error:
            answer = describe(error)
        connection.send(answer)


class WorkerGroup:
    """``num_ranks`` processes that stay; see the module's docstring."""

    def __init__(self, num_ranks, distributed=True):
        self.num_ranks = num_ranks
        self.distributed = distributed
        self.processes = []
        self.connections = []
        self.dump_paths = []
        self.cases = 0

    def start(self):
        # Forked from a process that has torch imported, and nothing of rrfp.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = free_port() if self.distributed else 0
        for rank in range(self.num_ranks):
            handle, dump_path = tempfile.mkstemp(prefix="rrfp-stacks-")
            os.close(handle)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, daemon=True,
                args=(rank, self.num_ranks, port, theirs, dump_path, dict(os.environ)),
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
            self.dump_paths.append(dump_path)
        self.collect(START_TIMEOUT_S, "starting the workers")

    def collect(self, timeout_s, what):
        """One message of each worker, or AssertionError with everybody's stacks."""
        answers = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.num_ranks:
            left = [c for r, c in enumerate(self.connections) if r not in answers]
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = [r for r in range(self.num_ranks) if r not in answers]
                stacks = self.stacks()
                self.kill()
                raise AssertionError(
                    f"watchdog: ranks {silent} of {self.num_ranks} gave no answer in "
                    f"{timeout_s} s while {what}; answered: {answers}\n{stacks}"
                )
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    self.kill()
                    raise AssertionError(f"rank {rank} died while {what}") from None
        return [answers[rank] for rank in range(self.num_ranks)]

    def run(self, function, *args, timeout_s=CASE_TIMEOUT_S):
        """``function(rank, num_ranks, *args)`` on every rank; a list of Answer."""
        if not self.processes:
            self.start()
        self.cases += 1
        for connection in self.connections:
            connection.send((function, args))
        return self.collect(timeout_s, f"running {function.__name__}{args!r:.2000}")

    def values(self, function, *args, timeout_s=CASE_TIMEOUT_S):
        """As run(), for cases that must succeed: the values, or AssertionError."""
        answers = self.run(function, *args, timeout_s=timeout_s)
        failed = {r: a.error_traceback for r, a in enumerate(answers) if a.error_type}
        if failed:
            self.kill()  # the next case starts on fresh processes
            raise AssertionError("\n".join(f"rank {r}:\n{t}" for r, t in failed.items()))
        return [answer.value for answer in answers]

    def stacks(self):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        texts = []
        for rank, path in enumerate(self.dump_paths):
            with open(path) as dump:
                texts.append(f"--- stacks of rank {rank}\n{dump.read()}")
        return "\n".join(texts)

    def kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        for path in self.dump_paths:
            os.unlink(path)
        self.processes, self.connections, self.dump_paths = [], [], []


_groups = {}


def worker_group(num_ranks, distributed=True):
    """The session's group of that size, started at its first use."""
    key = (num_ranks, distributed)
    if key not in _groups:
        _groups[key] = WorkerGroup(num_ranks, distributed)
        atexit.register(_groups[key].kill)
    return _groups[key]

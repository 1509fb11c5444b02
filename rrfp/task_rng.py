"""Random numbers of a task: keyed by (seed, step, stage, microbatch), whatever runs when.

A rank that has its process to itself seeds torch's default generator before each task and
restores it when the step is over. Worker threads share a process, and torch's default CPU
generator with it; there each draws from a generator of its own:

- Operations that draw take it in place of the default one. They are overridden at a dispatch key
  that only these threads turn on; other operations and threads do not pass there. A generator
  that the caller gives is respected.
- ``torch.get_rng_state``, ``set_rng_state`` and ``manual_seed`` mean the thread's generator while
  it runs a step, which is what activation checkpointing needs to repeat a mask.

A default generator of another device is seeded as it is: a rank has its device to itself.

Threads: everything is per thread, but for what is installed once, under a lock.
Cost: 2 to 3 us a task; in worker threads only for tasks that draw, and about 3 us for each
operation that does. ``benchmarks/random_cost.py``.
"""

import contextlib
import hashlib
import struct
import threading

import torch

_KEY = "TESTING_ONLY_GenericMode"  # unused by torch itself; off unless a thread turns it on
_format = struct.Struct("<Qqqqc")
_FORWARD, _GRADIENT = b"F", b"G"


def _key(seed, step, stage, microbatch, kind=_FORWARD):
    text = _format.pack(seed % (1 << 64), step, stage, microbatch, kind)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _device_generators():
    """The default generator of the current CUDA device, when CUDA is in use."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]


@contextlib.contextmanager
def task_rng(seed, step, stage, microbatch):
    """Draw inside as the forward of a task draws; afterwards torch's state is as before.

    With it a plain loop over stages and microbatches has the masks of a pipeline.

    Args:
        seed: The pipeline's ``seed=``; where that was None, ``torch.initial_seed()`` of rank 0.
        step: How many steps the pipeline had run before, ``Pipeline.state_dict()["step"]``.
        stage: The stage's index.
        microbatch: Its index in the caller's order.

    Example:
        >>> import rrfp, torch
        >>> with rrfp.task_rng(seed=1, step=0, stage=2, microbatch=3):
        ...     first = torch.rand(2)
        >>> with rrfp.task_rng(seed=1, step=0, stage=2, microbatch=3):
        ...     second = torch.rand(2)
        >>> torch.equal(first, second)
        True
    """
    generators = [torch.default_generator, *_device_generators()]
    states = [generator.get_state() for generator in generators]
    key = _key(seed, step, stage, microbatch)
    try:
        for generator in generators:
            generator.manual_seed(key)
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


class StepRandom:
    """The random numbers of one rank in one step, on the thread that runs it.

    Args:
        seed, step: Agreed by all ranks.
        shares_process: Whether other threads of this process may draw meanwhile.
    """

    def __init__(self, seed, step, shares_process):
        self._seed, self._step = seed, step
        self._shares_process = shares_process
        self._generators = ()  # that are seeded before each task
        self._own = None  # the thread's, which is seeded when a task first draws
        self._keys = {}  # of the tasks that are known beforehand

    @contextlib.contextmanager
    def active(self):
        """Around the tasks of the step; the caller's generators are as before afterwards."""
        devices = _device_generators()
        if self._shares_process:
            with _own_generator() as self._own, _restored(devices):
                self._generators = devices
                yield
        else:
            self._generators = (torch.default_generator, *devices)
            with _restored(self._generators):
                yield

    def prepare(self, tasks):
        """Compute the keys of (stage, kind, microbatch) now, rather than when they are due."""
        if self._generators:
            self._keys = {(k, s, m): self._key(k, s, m) for s, k, m in tasks}

    def begin(self, kind, stage, microbatch):
        """Before the task runs. Backward tasks draw other numbers than the forward."""
        if self._own is not None:
            self._own.due = (self, kind, stage, microbatch)
        if self._generators:
            key = self._keys.get((kind, stage, microbatch))
            if key is None:
                key = self._key(kind, stage, microbatch)
            for generator in self._generators:
                generator.manual_seed(key)

    def _key(self, kind, stage, microbatch):
        return _key(
            self._seed, self._step, stage, microbatch, _FORWARD if kind == "F" else _GRADIENT
        )


@contextlib.contextmanager
def _restored(generators):
    states = [generator.get_state() for generator in generators]

    def restore():
        for generator, state in zip(generators, states):
            generator.set_state(state)

    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # of a device that has failed: not what ended it
            restore()
        raise
    restore()


_thread = threading.local()
_install_lock = threading.Lock()
_libraries = []
_key_set = _below = None
_swap_lock = threading.Lock()
_TRACING_MODES = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")
_num_active = 0


class _OwnGenerator:
    """A thread's generator. ``due``: the task whose key it gets before anybody uses it; most
    tasks draw nothing, and need no key then."""

    __slots__ = ("_generator", "due")

    def __init__(self):
        self._generator = torch.Generator()
        self.due = None

    def keyed(self):
        if self.due is not None:
            (random, *task), self.due = self.due, None
            self._generator.manual_seed(random._key(*task))
        return self._generator


class _GeneratorOfThread:
    """Stands for torch's default CPU generator in ``torch.random``: the thread's own, if any."""

    def __getattr__(self, name):
        own = getattr(_thread, "own", None)
        return getattr(torch.default_generator if own is None else own.keyed(), name)


@contextlib.contextmanager
def _own_generator():
    """A generator that operations of this thread draw from."""
    global _num_active
    with _install_lock:
        _install()
        _num_active += 1
        if _num_active == 1:
            torch.random.default_generator = _GeneratorOfThread()
    _thread.own = _OwnGenerator()
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        yield _thread.own
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
        del _thread.own
        with _install_lock:
            _num_active -= 1
            if _num_active == 0:
                torch.random.default_generator = torch.default_generator


def _install():
    """Override the operations that draw, once in a process."""
    global _key_set, _below
    if _libraries:
        return
    key = torch._C._dispatch_key_parse(_KEY)
    _key_set = torch._C.DispatchKeySet(key)
    _below = torch._C._dispatch_keyset_full_after(key)
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    drawing = torch.library.Library("aten", "IMPL")
    _libraries.extend((others, drawing))
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        operation = getattr(packet, schema.overload_name or "default", None)
        if operation is None or torch.Tag.nondeterministic_seeded not in operation.tags:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(
            operation.name(), "CompositeImplicitAutograd"  # is made of others, which are overridden
        ):
            drawing.impl(operation, _drawing(operation, schema), _KEY, with_keyset=True)


def _drawing(operation, schema):
    """The operation with this thread's generator in the place of the default one."""
    names = [argument.name for argument in schema.arguments]
    place = names.index("generator") if "generator" in names else None

    def kernel(key_set, *args, **kwargs):
        if torch._C._len_torch_dispatch_stack():
            return _draw_under_modes(operation, args, kwargs)
        if place is None or not _is_on_cpu(args, kwargs):
            # It makes a tensor first; the operation that fills it comes here as well.
            return operation.redispatch(key_set & _below, *args, **kwargs)
        if len(args) > place:
            if args[place] is None:
                args = (*args[:place], _own(), *args[place + 1 :])
        elif kwargs.get("generator") is None:
            kwargs["generator"] = _own()
        return operation.redispatch(key_set & _below, *args, **kwargs)

    return kernel


def shared_state():
    """The state of torch's default CPU generator, which worker threads leave as it is."""
    with _swap_lock:
        return torch.default_generator.get_state()


def _own():
    own = getattr(_thread, "own", None)
    if own is None:  # autograd's own thread for a device took over this thread's keys
        raise RuntimeError(
            "a backward of this stage draws random numbers on the CPU in a thread of autograd's, "
            "where rrfp cannot key them; use one process per rank."
        )
    return own.keyed()


def _is_on_cpu(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.is_cpu
    return False


def _draw_under_modes(operation, args, kwargs):
    """Draw while a dispatch mode is active, which hides what the operation calls.

    The default generator takes over the state of this thread's for the call, under a lock.
    """
    modes = [
        torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())
    ]
    with torch._C._ExcludeDispatchKeyGuard(_key_set):
        if any(type(mode).__name__ in _TRACING_MODES for mode in modes):
            return operation(*args, **kwargs)
        with _swap_lock:
            own, shared = _own(), torch.default_generator
            before = shared.get_state()
            shared.set_state(own.get_state())
            try:
                return operation(*args, **kwargs)
            finally:
                own.set_state(shared.get_state())
                shared.set_state(before)

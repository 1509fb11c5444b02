"""What a forward holds until its backward: measured, and foretold for limits in bytes.

Measured is the memory that the autograd graph of a forward keeps, its outputs and what it
received, each storage once; without parameters and buffers, which are there anyway, and the
caller's own inputs. Tensors that hooks have packed (activation checkpointing, offloading) count
nothing: they are not there.
"""

import contextlib
from collections import deque
from dataclasses import dataclass, field

import torch

from rrfp.boundary import flatten
from rrfp.storage import storage_address

MOST_BYTES = 1 << 46  # of one forward; the core's sums fit into 64 bits
_NUM_STEPS = 8  # a step is foretold from so many before it
_saved_names = {}  # type of a graph node -> names of (saved tensor, as it was packed)


class HeldBytes:
    """What the stages of one rank hold in one step; its worker's."""

    def __init__(self):
        self.sizes = {}  # (stage, microbatch) -> bytes
        self.held = 0
        self.peak = 0

    def take(self, stage, microbatch, num_bytes):
        self.sizes[stage, microbatch] = num_bytes
        self.held += num_bytes
        self.peak = max(self.peak, self.held)

    def give_back(self, stage, microbatch):
        self.held -= self.sizes[stage, microbatch]


@dataclass
class ActivationMemory:
    """The sizes that the stages of this process had in the last steps."""

    _steps: dict = field(default_factory=dict)  # stage -> deque of (largest, its cost, per cost)

    def learn(self, held, costs):
        """After a step: its ``HeldBytes``, and the costs of its microbatches if they are known."""
        of_stage = {}
        for (stage, microbatch), size in held.sizes.items():
            largest, most, per_cost = of_stage.get(stage, (0, 0.0, 0.0))
            cost = costs[microbatch] if costs else 0.0
            ratio = size / cost if cost else float("inf")
            of_stage[stage] = (max(largest, size), max(most, cost), max(per_cost, ratio))
        for stage, seen in of_stage.items():
            self._steps.setdefault(stage, deque(maxlen=_NUM_STEPS)).append(seen)

    def known(self):
        """``{stage: (largest size, largest cost, largest size per cost)}`` of those steps."""
        return {stage: tuple(map(max, zip(*steps))) for stage, steps in self._steps.items()}


def foretold(seen, num_microbatches, costs):
    """The size of each microbatch by what ``ActivationMemory.known`` says of its stage.

    Rounded up to a few leading bits: the plan of a step stays that of the one before.
    """
    largest, most, per_cost = seen
    sizes = []
    for microbatch in range(num_microbatches):
        size = largest
        if costs and per_cost != float("inf"):
            by_cost = per_cost * costs[microbatch]
            size = by_cost if costs[microbatch] > most else min(by_cost, largest)
        sizes.append(_rounded_up(int(min(size, MOST_BYTES))))
    return tuple(sizes)


def _rounded_up(number):
    step = 1 << max(0, number.bit_length() - 5)
    return -(-number // step) * step


def addresses_of(*values):
    """Where the tensors in some trees have their memory."""
    return {storage_address(tensor) for tensor in tensors_in(*values)}


def tensors_in(*values):
    """The tensors in some trees."""
    return [
        tensor for value in values for tensor in flatten(value)[1]
        if isinstance(tensor, torch.Tensor)
    ]


def bytes_held(roots, tensors, not_counted):
    """Bytes behind the graph of ``roots`` and in ``tensors``, but for those at ``not_counted``.

    Reads the graph and changes nothing. Cost: some ten microseconds per node.
    """
    size_at = {}
    for tensor in _saved_tensors(roots):
        _count(tensor, size_at)
    for tensor in tensors:
        _count(tensor, size_at)
    return sum(size for address, size in size_at.items() if address not in not_counted)


def _count(tensor, size_at):
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is not torch.strided:
        return
    storage = tensor.untyped_storage()
    if storage.data_ptr():
        size_at[storage.data_ptr()] = storage.nbytes()


def _saved_tensors(roots):
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            if all(saved.unpack_hook is None for saved in node._raw_saved_tensors):
                with contextlib.suppress(RuntimeError):  # as in _unpacked
                    yield from [t for t in node.saved_tensors if t is not None]
        else:
            for name, raw_name in _names_of(node):
                yield from _unpacked(node, name, raw_name)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _names_of(node):
    names = _saved_names.get(type(node))
    if names is None:
        raw = [name for name in dir(node) if name.startswith("_raw_saved_")]
        names = tuple((name.removeprefix("_raw"), name) for name in raw)
        _saved_names[type(node)] = names
    return names


def _unpacked(node, name, raw_name):
    raw = getattr(node, raw_name)
    raw = raw if isinstance(raw, (tuple, list)) else (raw,)
    if any(one.unpack_hook is not None for one in raw):
        return
    try:
        value = getattr(node, name)
    except RuntimeError:  # changed in place since; the backward will say so if it needs it
        return
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, torch.Tensor):
            yield tensor

"""One stage in one step: its tables by microbatch, and how its tasks run.

Nothing here waits, sends or chooses; ``worker.py`` calls ``run`` with tasks in whatever order the
runtime decides.
"""

import weakref
from dataclasses import dataclass, field

import torch

from rrfp.activations import addresses_of, bytes_held, tensors_in
from rrfp.auxiliary_loss import call_collecting
from rrfp.boundary import Parcel, flatten, gradients_parcel, refuse_hidden_tensors
from rrfp.split_backward import run_input_half
from rrfp.stage_traits import BufferWatch
from rrfp.storage import is_shared, overlaps, settled, storage_address

_PLAIN_TYPES = (type(None), bool, int, float, str, bytes)


class _Arrival(torch.autograd.Function):
    """Tensors from another stage enter this stage's graph; their gradients end in the box.

    Its outputs are neither leaves nor views, so that a stage may begin with an in-place layer.
    """

    @staticmethod
    def forward(ctx, anchor, box):
        ctx.set_materialize_grads(False)
        ctx.box = box
        tensors, box.tensors = box.tensors, ()
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        # Added, not set: a stage that calls backward() in its forward comes here before its B.
        ctx.box.gradients = tuple(
            new if old is None else old if new is None else old + new
            for old, new in zip(ctx.box.gradients, gradients)
        )
        return None, None


# What Function.apply comes to outside functorch, whose transforms end at a stage's border.
_enter_graph = super(torch.autograd.Function, _Arrival).apply


class _Box:
    __slots__ = ("tensors", "gradients")

    def __init__(self, tensors):
        self.tensors = tensors
        self.gradients = (None,) * len(tensors)


@dataclass
class StageInputs:
    """What the caller gave to one stage for a step; None where it gave nothing.

    Attributes:
        inputs: Per microbatch, on a source stage.
        targets: Per microbatch, on a loss stage.
        kwargs: Per microbatch, a dict of keyword arguments.
    """

    inputs: list | None = None
    targets: list | None = None
    kwargs: list | None = None


@dataclass
class LossRule:
    """How a stage's losses are computed and how their gradients begin.

    Attributes:
        is_loss_stage: Whether its output goes into ``loss_fn``.
        loss_fn: ``loss_fn(output, target)``, or None when outputs alone are wanted.
        factors: Per microbatch, what d(loss) is multiplied with: weight times grad_scale.
    """

    is_loss_stage: bool
    loss_fn: object
    factors: list = field(default_factory=list)


class StageStep:
    """A stage's tasks in one step; used by its rank's worker only."""

    def __init__(self, stage, module, neighbours, given, loss_rule, num_microbatches, modes,
                 forward_only, return_outputs, device, deterministic=False, in_order=False,
                 held_bytes=None):
        self.stage = stage
        self.sources, self.consumers = neighbours  # stages, ascending
        self.device = device
        self.module = module
        self.given = given
        self.loss_rule = loss_rule
        self.modes = modes
        self.forward_only = forward_only
        self.return_outputs = return_outputs
        self.in_order = in_order  # parameter gradients are added by W alone
        self.fused_because = None  # why the last I was the whole backward, if one was
        self.has_split = False  # an I has left something for its W, or had nothing to leave
        self.held_bytes = held_bytes  # where they are counted: the rank's HeldBytes
        self.buffers = BufferWatch(module) if deterministic else None
        self.losses = [None] * num_microbatches
        self.metrics = [None] * num_microbatches
        self.outputs = [None] * num_microbatches
        self._saved = [None] * num_microbatches  # (roots, boxes, held) from F to B or I
        self._weight_halves = [None] * num_microbatches  # from I to W
        self._live = {}  # storage address -> (microbatch, weak reference to its tensor)
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._kept = {  # memory that the module holds on to and may change
            storage_address(tensor) for tensor in (*module.parameters(), *module.buffers())
        } - {0}

    def run(self, kind, microbatch, parcels):
        """Run a task on what its neighbours sent: the parcels of the sources (F), the gradients
        of the consumers (B, I), ascending by stage.

        Returns (stages, parcels): what each of those stages gets. A W sends nothing.
        """
        if kind == "F":
            return self.consumers, self.forward(microbatch, parcels)
        if kind == "I":
            return self.sources, self.input_gradient(microbatch, parcels)
        if kind == "W":
            self.weight_gradient(microbatch)
            targets = (), ()
        else:
            targets = self.sources, self.backward(microbatch, parcels)
        if self.held_bytes is not None:
            self.held_bytes.give_back(self.stage, microbatch)
        return targets

    def forward(self, microbatch, parcels):
        """Run F; returns a parcel for each consumer."""
        boxes = [self._arrive(parcel) for parcel in parcels]
        values = [parcel.value() for parcel in parcels] or [self.given.inputs[microbatch]]
        args = [a for v in values for a in (v if type(v) is tuple else (v,))]
        kwargs = self.given.kwargs[microbatch] if self.given.kwargs is not None else {}
        autocast = self.modes.autocast()
        if autocast is None:
            output, loss, auxiliary = self._call(microbatch, args, kwargs)
        else:
            with autocast:
                output, loss, auxiliary = self._call(microbatch, args, kwargs)
        if self.buffers is not None:
            self.buffers.look()
        return self._hand_over(microbatch, output, loss, auxiliary, boxes, args, kwargs)

    def backward(self, microbatch, parcels):
        """Run B; returns a parcel of gradients for each source."""
        roots, gradients, boxes = self._begin_backward(microbatch, parcels)
        if roots:
            torch.autograd.backward(roots, gradients)
        del roots, gradients
        return [gradients_parcel(found) for found in _own_gradients(boxes)]

    def input_gradient(self, microbatch, parcels):
        """Run I: as ``backward``, but what only parameters need is left to W where it can be."""
        roots, gradients, boxes = self._begin_backward(microbatch, parcels)
        anchor = self._anchor if any(box is not None for box in boxes) else None
        half = run_input_half(roots, gradients, anchor, self.in_order)
        del roots, gradients
        self._weight_halves[microbatch] = half
        if half.fused_because is None:
            self.has_split = True
        else:
            self.fused_because = half.fused_because
        own = _own_gradients(boxes, lambda g: is_shared(g) or half.shares_memory(g))
        return [gradients_parcel(found) for found in own]

    def weight_gradient(self, microbatch):
        """Run W: add what I left to the parameters' ``.grad``."""
        half, self._weight_halves[microbatch] = self._weight_halves[microbatch], None
        half.run()

    def _begin_backward(self, microbatch, parcels):
        """(what gets a gradient, those gradients, boxes) of a microbatch, taken out."""
        roots, losses, boxes, _ = self._saved[microbatch]
        self._saved[microbatch] = None
        columns = zip(*(parcel.leaves for parcel in parcels), strict=True)
        gradients = [_sum_of(column) for column in columns]
        roots = [*roots, *losses]
        gradients.extend(self._seed(microbatch, loss) for loss in losses)
        if any(gradient is None for gradient in gradients):
            pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
            roots, gradients = [r for r, _ in pairs], [g for _, g in pairs]
        if not self.return_outputs:
            self._forget(microbatch)
        return roots, gradients, boxes

    def _call(self, microbatch, args, kwargs):
        """(output, what ``loss_fn`` returned, auxiliary losses)."""
        if self.forward_only:
            output, auxiliary = self.module(*args, **kwargs), ()
        else:
            output, auxiliary = call_collecting(self.module, args, kwargs)
        if not self.loss_rule.is_loss_stage or self.loss_rule.loss_fn is None:
            return output, None, auxiliary
        targets = self.given.targets
        target = targets[microbatch] if targets is not None else None
        return output, self.loss_rule.loss_fn(output, target), auxiliary

    def _arrive(self, parcel):
        """Make the parcel's leaves part of this stage's graph; None when no gradient is due."""
        if not parcel.needs_grad or not self.modes.grad:
            return None
        leaves = parcel.leaves
        box = _Box(tuple([leaves[index] for index in parcel.needs_grad]))
        for index, tensor in zip(parcel.needs_grad, _enter_graph(self._anchor, box)):
            leaves[index] = tensor
        return box

    def _hand_over(self, microbatch, output, loss, auxiliary, boxes, args, kwargs):
        """Keep what the backward needs; returns a parcel for each consumer."""
        tree, leaves = flatten(output)
        roots, needs_grad, handed = [], [], []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and self.consumers:
                    roots.append(leaf)
                    needs_grad.append(index)
                leaf = self._detach(microbatch, leaf, args, kwargs)
                # Each has memory of its own, as between processes: an in-place write to one
                # would change the other, and autograd would not know.
                tensors = [other for other in handed if isinstance(other, torch.Tensor)]
                if tensors and overlaps(leaf, tensors):
                    leaf = leaf.clone()
            elif self.consumers and type(leaf) not in _PLAIN_TYPES:
                refuse_hidden_tensors(self.stage, leaf)
            handed.append(leaf)
        if self.loss_rule.is_loss_stage:
            loss = self._keep_loss(microbatch, loss)
            if self.return_outputs:
                self.outputs[microbatch] = Parcel(tree, list(handed)).value()
        if not self.forward_only:
            # The handed leaves stay too: as long as they live, no other tensor has their address.
            losses = [*([] if loss is None else [loss]), *auxiliary]
            self._saved[microbatch] = (roots, losses, boxes, tuple(handed))
            if self.held_bytes is not None:
                received = args if self.sources else ()
                given = () if self.sources else args
                size = bytes_held(
                    [*roots, *losses], tensors_in(received, handed),
                    self._kept | addresses_of(given, kwargs),
                )
                self.held_bytes.take(self.stage, microbatch, size)
        # Only one reader may share the memory: another's in-place write must not reach it. The
        # loss and the caller, who gets the outputs, are readers too.
        shared = [] if self.loss_rule.is_loss_stage else [handed]
        copies = [
            [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in handed]
            for _ in self.consumers[len(shared):]
        ]
        return [Parcel(tree, leaves, needs_grad) for leaves in (*shared, *copies)]

    def _detach(self, microbatch, tensor, args, kwargs):
        """The tensor for another holder: same memory, same version counter, no graph."""
        if tensor.device != self.device:
            raise ValueError(
                f"stage {self.stage} is on {self.device} and returned a tensor on "
                f"{tensor.device}; return tensors of the stage's own device."
            )
        if hasattr(tensor, "to_local"):
            raise ValueError(
                f"stage {self.stage} returned a DTensor, which cannot leave its mesh; return "
                ".to_local() or .full_tensor() of it."
            )
        detached = settled(tensor.detach())
        if tensor.layout is not torch.strided:
            return detached
        address = storage_address(detached)
        if address in self._kept:
            return detached.clone()  # either side may change it before the other has read it
        known = self._live.get(address)
        if known is not None and known[0] != microbatch and known[1]() is not None:
            self._refuse_reuse(microbatch, known[0], address, args, kwargs)
        if address:
            self._live[address] = (microbatch, weakref.ref(detached))
        return detached

    def _refuse_reuse(self, microbatch, other, address, args, kwargs):
        for tensor in flatten((args, kwargs))[1]:
            if isinstance(tensor, torch.Tensor) and (
                tensor.untyped_storage().data_ptr() == address
            ):
                return
        raise ValueError(
            f"stage {self.stage} returned the same memory for microbatch {microbatch} as for "
            f"microbatch {other}, which is still in flight. Outputs in a static buffer (CUDA "
            "graphs, preallocated tensors) would be overwritten: return .clone() of it."
        )

    def _forget(self, microbatch):
        self._live = {a: entry for a, entry in self._live.items() if entry[0] != microbatch}

    def _keep_loss(self, microbatch, loss):
        """Keep what ``loss_fn`` returned; the loss alone, None where there is no loss_fn."""
        if self.loss_rule.loss_fn is None:
            return None
        metrics = None
        if type(loss) is tuple and len(loss) == 2:
            loss, metrics = loss
        self._check_loss(microbatch, loss)
        self.losses[microbatch] = loss.detach()
        self.metrics[microbatch] = detach_tree(metrics)
        return loss

    def _check_loss(self, microbatch, loss):
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"loss_fn returned a {type(loss).__name__} for microbatch {microbatch}; return a "
                "scalar tensor, or (scalar tensor, metrics)."
            )
        if loss.dim() != 0 and loss.numel() != 1:
            raise ValueError(
                f"loss_fn returned a loss of shape {tuple(loss.shape)} for microbatch "
                f"{microbatch}; it must be a scalar. Reduce it, with .mean() or .sum()."
            )
        if not self.forward_only and not loss.requires_grad:
            raise ValueError(
                f"the loss of microbatch {microbatch} does not require grad, so there is nothing "
                "to train. Check that it is computed from the stage's output, or pass "
                "forward_only=True."
            )

    def _seed(self, microbatch, loss):
        """The gradient of the loss itself: its weight and scale, in the loss's dtype.

        A new tensor every time: a parameter may take its memory over as ``.grad``.
        """
        factor = self.loss_rule.factors[microbatch]
        return torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)


def _own_gradients(boxes, is_read=is_shared):
    """By source: the captured gradients, each in memory of its own.

    Autograd may let a parameter, of the stage or of anything else that took part, keep the very
    memory of a gradient as its ``.grad``; the next backward would add to it while the gradient is
    still on its way. Two inputs may get one gradient, too, and W may still read it: `is_read`.
    """
    seen = set()  # one tensor for two inputs counts as one user of its memory

    def own(gradient):
        if gradient is None:
            return None
        gradient = settled(gradient)
        address = storage_address(gradient)
        if address in seen or is_read(gradient):
            return gradient.clone()
        seen.add(address)
        return gradient

    return [[] if box is None else [own(g) for g in box.gradients] for box in boxes]


def _sum_of(gradients):
    """Of one tensor's gradients from its consumers, in their order; None where none has any."""
    total = None
    for gradient in gradients:
        total = gradient if total is None else total if gradient is None else total + gradient
    return total


def detach_tree(value):
    """The value with every tensor in it detached."""
    if value is None:
        return None
    tree, leaves = flatten(value)
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Parcel(tree, detached).value()

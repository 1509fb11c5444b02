"""One stage in one step: its tables by microbatch, and how its tasks run.

Nothing here waits, sends or chooses; ``worker.py`` calls ``run`` with tasks in whatever order the
runtime decides.
"""

import weakref
from dataclasses import dataclass, field

import torch

from rrfp.activations import addresses_of, bytes_held, tensors_in
from rrfp.auxiliary_loss import call_collecting
from rrfp.backward_pass import run_backward
from rrfp.boundary import Parcel, flatten, refuse_hidden_tensors
from rrfp.entry import enter, own_gradients, sum_of
from rrfp.split_backward import run_input_half
from rrfp.stage_traits import BufferWatch
from rrfp.storage import overlaps, settled, storage_address
from rrfp.value_text import value_text

_PLAIN_TYPES = (type(None), bool, int, float, str, bytes)


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
                 held_bytes=None, split_memory=None, adds_in_products=False, sends_away=False):
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
        self.failed_on = None  # what a forward that raised was called with, in words
        self.has_split = False  # an I has left something for its W, or had nothing to leave
        self.held_bytes = held_bytes  # where they are counted: the rank's HeldBytes
        self.sends_away = sends_away  # no consumer is in this process, and may write to an output
        self.split_memory = split_memory  # what earlier steps showed of the stage's graphs
        if split_memory is not None:
            split_memory.begin_step(adds_in_products)
        self.buffers = BufferWatch(module) if deterministic else None
        self.losses = [None] * num_microbatches
        self.metrics = [None] * num_microbatches
        self.outputs = [None] * num_microbatches
        self._saved = [None] * num_microbatches  # (roots, losses, boxes, held) from F to B or I
        self._sent = {}  # microbatch -> [(tensor sent away, its version)]
        self._weight_halves = [None] * num_microbatches  # from I to W
        self._live = {}  # storage address -> (microbatch, weak reference to its tensor)
        self._addresses = [()] * num_microbatches  # of its tensors in _live
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
        boxes, args = [], []
        if not parcels:
            _unpack(self.given.inputs[microbatch], args)
        for parcel in parcels:
            boxes.append(enter(parcel, self._anchor) if self.modes.grad else None)
            _unpack(parcel.value(), args)
        kwargs = self.given.kwargs[microbatch] if self.given.kwargs is not None else {}
        autocast = self.modes.autocast()
        try:
            if autocast is None:
                output, loss, auxiliary = self._call(microbatch, args, kwargs)
            else:
                with autocast:
                    output, loss, auxiliary = self._call(microbatch, args, kwargs)
        except Exception:
            self.failed_on = self.failed_on or self._origin_text(microbatch, parcels)
            raise
        if self.buffers is not None:
            self.buffers.look()
        return self._hand_over(microbatch, output, loss, auxiliary, boxes, args, kwargs)

    def backward(self, microbatch, parcels):
        """Run B; returns a parcel of gradients for each source."""
        roots, gradients, boxes = self._begin_backward(microbatch, parcels)
        if not self.return_outputs:
            self._forget(microbatch)
        if roots:
            run_backward(roots, gradients)
        del roots, gradients
        return own_gradients(boxes)

    def input_gradient(self, microbatch, parcels):
        """Run I: as ``backward``, but what only parameters need is left to W where it can be.

        A consumer's W may still read the output: its memory stays known while that has it.
        """
        roots, gradients, boxes = self._begin_backward(microbatch, parcels)
        anchor = self._anchor if any(box is not None for box in boxes) else None
        half = run_input_half(roots, gradients, anchor, self.in_order, self.split_memory)
        del roots, gradients
        self._weight_halves[microbatch] = half
        if half.fused_because is None:
            self.has_split = True
        else:
            self.fused_because = half.fused_because
        return own_gradients(boxes)

    def weight_gradient(self, microbatch):
        """Run W: add what I left to the parameters' ``.grad``."""
        half, self._weight_halves[microbatch] = self._weight_halves[microbatch], None
        half.run()

    def _begin_backward(self, microbatch, parcels):
        """(what gets a gradient, those gradients, boxes) of a microbatch, taken out."""
        outputs, losses, boxes, _ = self._saved[microbatch]
        self._saved[microbatch] = None
        for tensor, version in self._sent.pop(microbatch, ()):
            if tensor._version != version:
                raise ValueError(
                    f"stage {self.stage} changed in place what it had returned for microbatch "
                    f"{microbatch}, before its backward: what was sent may be the one or the "
                    "other. Return .clone() of what is written to again."
                )
        if len(parcels) == 1:
            received = parcels[0].leaves
        else:
            columns = zip(*[parcel.leaves for parcel in parcels], strict=True)
            received = [sum_of(column) for column in columns]
        roots, gradients = [], []
        if outputs or received:
            for root, gradient in zip(outputs, received, strict=True):
                if gradient is not None:
                    roots.append(root)
                    gradients.append(gradient)
        for loss in losses:
            roots.append(loss)
            gradients.append(self._seed(microbatch, loss))
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
        try:
            loss = self.loss_rule.loss_fn(output, target)
        except Exception:
            self.failed_on = (f"loss_fn was called with what stage {self.stage} returned, "
                              f"{value_text(output)}, and {value_text(target)} as target.")
            raise
        return output, loss, auxiliary

    def _origin_text(self, microbatch, parcels):
        """Where the arguments of a forward came from, and what they are."""
        if not parcels:
            given = value_text(self.given.inputs[microbatch])
            return f"Its input was given as microbatch {microbatch}: {given}."
        came = [f"from stage {source}: {value_text(parcel.value())}"
                for source, parcel in zip(self.sources, parcels, strict=True)]
        return f"Its input came {', and '.join(came)}."

    def _hand_over(self, microbatch, output, loss, auxiliary, boxes, args, kwargs):
        """Keep what the backward needs; returns a parcel for each consumer."""
        tree, leaves = flatten(output)
        roots, needs_grad, handed, tensors = [], [], [], []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if self.consumers and leaf.requires_grad:
                    roots.append(leaf)
                    needs_grad.append(index)
                leaf = self._detach(microbatch, leaf, args, kwargs)
                # Each has memory of its own, as between processes: an in-place write to one
                # would change the other, and autograd would not know.
                if tensors and overlaps(leaf, tensors):
                    leaf = leaf.clone()
                tensors.append(leaf)
            elif self.consumers and type(leaf) not in _PLAIN_TYPES:
                refuse_hidden_tensors(self.stage, leaf)
            handed.append(leaf)
        if self.loss_rule.is_loss_stage:
            loss = self._keep_loss(microbatch, loss)
            if self.return_outputs:
                self.outputs[microbatch] = Parcel(tree, list(handed)).value()
        if not self.forward_only:
            # The handed leaves stay too: as long as they live, no other tensor has their address.
            losses = auxiliary if loss is None else [loss, *auxiliary]
            self._saved[microbatch] = (roots, losses, boxes, tuple(handed))
            if self.sends_away:
                sent = filter(_is_sent_as_it_is, handed)
                self._sent[microbatch] = [(tensor, tensor._version) for tensor in sent]
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
        parcels = []
        for _ in self.consumers:
            if parcels or self.loss_rule.is_loss_stage:
                copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
                          for leaf in handed]
                parcels.append(Parcel(tree, copies, needs_grad))
            else:
                parcels.append(Parcel(tree, handed, needs_grad))
        return parcels

    def _detach(self, microbatch, tensor, args, kwargs):
        """The tensor for another holder: same memory, same version counter, no graph."""
        if tensor.device != self.device:
            raise ValueError(
                f"stage {self.stage} is on {self.device} and returned a tensor on "
                f"{tensor.device}; return tensors of the stage's own device."
            )
        if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
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
            self._addresses[microbatch] += (address,)
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
        for address in self._addresses[microbatch]:
            # Another one may have it by now.
            if address in self._live and self._live[address][0] == microbatch:
                del self._live[address]
        self._addresses[microbatch] = ()

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
        if loss.is_complex():
            raise ValueError(
                f"loss_fn returned a complex loss for microbatch {microbatch}; return a real one, "
                "such as its .abs() or .real."
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
        if type(loss) is torch.Tensor:
            return loss.new_full(loss.shape, factor)
        return torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)


def _is_sent_as_it_is(leaf):
    """Whether its memory is read later, and its version tells of changes to that memory alone."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and not leaf.is_inference()  # has no version
        and leaf.is_contiguous()
        and leaf.nbytes == leaf.untyped_storage().nbytes()
    )


def _unpack(value, args):
    """Add to a call's arguments: the members of a tuple, or a value that is none."""
    if type(value) is tuple:
        args.extend(value)
    else:
        args.append(value)


def detach_tree(value):
    """The value with every tensor in it detached."""
    if value is None:
        return None
    tree, leaves = flatten(value)
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Parcel(tree, detached).value()

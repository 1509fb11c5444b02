"""Tied parameters: one in each of several stages, trained as if all were the same parameter.

Every stage that holds one has a copy of its own. During a step each copy collects the gradient of
its stage alone; at the end these are added, in the order of stages, and every copy gets the sum
on top of what its ``.grad`` held before the step. Equal values and equal gradients then stay
equal under the same optimizer.

A *holder* is (stage, name of the parameter in it), a *group* the holders that are tied.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rrfp.given_lists import is_list

_NUM_SAMPLES = 64
# Of the largest sample. Rounding makes copies differ by far less, another state by far more.
_MAX_DRIFT = 0.05
# Copies that gradient norms leave out: all of a group but the first. Keys are held weakly.
_later_copies = WeakTensorKeyDictionary()


def normalise_tied(tied):
    """Groups of holders, each ascending by stage; one group may be given without its list.

    Raises:
        TypeError: Not (stage, name) pairs or lists of them.
        ValueError: A group of one, a holder named twice.
    """
    if tied is None:
        return ()
    what = "pass [(stage, name), ...] for one shared parameter, or a list of such lists"
    if not is_list(tied):
        raise TypeError(f"tied is {tied!r}; {what}.")
    groups = list(tied)
    if groups and all(_is_holder(item) for item in groups):
        groups = [groups]
    seen = set()
    for group in groups:
        if not is_list(group):
            raise TypeError(f"tied lists {group!r}; {what}.")
        for holder in group:
            if not _is_holder(holder):
                raise TypeError(f"tied lists {holder!r}; {what}.")
            if tuple(holder) in seen:
                raise ValueError(f"tied names {_text(holder)} twice; name each parameter once.")
            seen.add(tuple(holder))
        if len(group) < 2:
            raise ValueError(
                f"tied has the group {list(group)!r}; at least two parameters can be tied."
            )
    return tuple(tuple(sorted(map(tuple, group))) for group in groups)


def _is_holder(item):
    return (
        isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2
        and isinstance(item[0], int) and not isinstance(item[0], bool) and item[0] >= 0
        and isinstance(item[1], str)
    )


def _text(holder):
    return f"parameter {holder[1]} of stage {holder[0]}"


def describe_holders(groups, modules):
    """``{holder: (shape, dtype, digest of the values)}`` of the holders in ``{stage: module}``.

    Raises:
        ValueError: No such parameter, one that two holders share already, a DTensor, a GPU's.
    """
    described, holder_of = {}, {}
    for holder in (holder for group in groups for holder in group):
        stage, name = holder
        if stage not in modules:
            continue
        try:
            parameter = modules[stage].get_parameter(name)
        except AttributeError:
            known = [known for known, _ in modules[stage].named_parameters()]
            raise ValueError(
                f"tied names {_text(holder)}, which has none of that name; it has {known}."
            ) from None
        other = holder_of.setdefault(id(parameter), holder)
        if other != holder:
            raise ValueError(
                f"tied names {_text(other)} and {_text(holder)}, which are the same parameter "
                "already; name it once."
            )
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{_text(holder)} is a DTensor, which cannot be tied yet; keep it whole."
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"tied names {_text(holder)}, which is on {parameter.device}; on GPUs that is not "
                "supported yet. Leave tied at None, or keep the stages on the CPU."
            )
        plain = parameter.detach().contiguous().reshape(-1)
        digest = hashlib.sha256(plain.view(torch.uint8).numpy()).hexdigest()
        described[holder] = (tuple(parameter.shape), str(parameter.dtype), digest)
    return described


def check_holders(groups, described, num_stages):
    """Refuse groups whose parameters differ. ``described``: of the holders of all ranks.

    Raises:
        ValueError: Names both, and what differs.
    """
    for group in groups:
        for holder in group:
            if holder[0] >= num_stages:
                raise ValueError(
                    f"tied names {_text(holder)}; the stages are 0 to {num_stages - 1}."
                )
        first = group[0]
        for holder in group[1:]:
            for index, what in enumerate(("shape", "dtype")):
                ours, theirs = described[first][index], described[holder][index]
                if ours != theirs:
                    raise ValueError(
                        f"tied parameters differ in {what}: {_text(first)} has {ours}, "
                        f"{_text(holder)} has {theirs}."
                    )
            if described[first][2] != described[holder][2]:
                raise ValueError(
                    f"tied parameters differ in value: {_text(first)} and {_text(holder)}. Copy "
                    "the one into the other, or load both from the same state, before the "
                    "pipeline is built."
                )


def mark_copies(groups, modules):
    """Remember which parameters of these modules are later copies of a tied one."""
    later = {holder for group in groups for holder in group[1:]}
    if later or len(_later_copies):
        for module in modules.values():
            for parameter in module.parameters():
                _later_copies.pop(parameter, None)
        for stage, name in later:
            if stage in modules:
                _later_copies[modules[stage].get_parameter(name)] = True


def is_later_copy(parameter):
    """Whether its gradient is counted elsewhere: at the first stage that holds the parameter."""
    return parameter in _later_copies


class TiedStep:
    """The tied parameters of one process in one step; a context in which a step runs.

    Inside, ``.grad`` of a holder is the gradient of the step alone. On the way out, however the
    step ended, what was there before is added to it again, in its own memory.
    """

    def __init__(self, groups, modules, forward_only):
        self.groups = () if forward_only else groups
        self.parameters = {
            holder: modules[holder[0]].get_parameter(holder[1])
            for group in self.groups for holder in group if holder[0] in modules
        }
        self._earlier = []

    def __enter__(self):
        for parameter in self.parameters.values():
            self._earlier.append((parameter, parameter.grad))
            parameter.grad = None
        return self

    @torch.no_grad()
    def __exit__(self, *_):
        for parameter, earlier in self._earlier:
            if earlier is None:
                continue
            own, parameter.grad = parameter.grad, earlier
            if own is not None and earlier.layout is torch.strided:
                earlier.add_(own)
            elif own is not None:
                parameter.grad = own + earlier
        self._earlier = []

    def samples(self):
        """``{holder: (requires_grad, some of its values)}``: what ``check_drift`` compares."""
        return {
            holder: (parameter.requires_grad, _sampled(parameter))
            for holder, parameter in self.parameters.items()
        }

    def gradient(self, holder):
        """The step's gradient of a holder of this process, strided; or None."""
        gradient = self.parameters[holder].grad
        if gradient is not None and gradient.layout is not torch.strided:
            return gradient.to_dense()
        return gradient

    @torch.no_grad()
    def keep(self, holder, total):
        """Make ``total`` (as many elements, in any shape; or None) the step's gradient."""
        parameter = self.parameters[holder]
        if total is None:
            return  # then no holder has one
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        parameter.grad.copy_(total.view(parameter.shape))

    @torch.no_grad()
    def add_up(self):
        """Give every holder the sum over its group; all of them are in this process."""
        for group in self.groups:
            total = None
            for holder in group:
                gradient = self.gradient(holder)
                if gradient is not None:
                    total = gradient.clone() if total is None else total.add_(gradient)
            for holder in group:
                self.keep(holder, total)


def _sampled(parameter):
    plain = parameter.detach()
    if plain.numel() == 0:
        return []
    places = torch.linspace(0, plain.numel() - 1, min(_NUM_SAMPLES, plain.numel()),
                            dtype=torch.float64).long()
    if plain.dim() > 0:
        plain = plain[torch.unravel_index(places, plain.shape)]
    return torch.view_as_real(plain.reshape(-1).to(torch.complex128)).flatten().tolist()


def check_drift(groups, views):
    """Refuse a step whose tied parameters are not equal any more. ``views``: of all ranks.

    Raises:
        ValueError: Names both and the values.
    """
    if not groups:
        return
    samples = {holder: sample for view in views for holder, sample in view["tied"].items()}
    for group in groups:
        for holder in group[1:]:
            if holder not in samples:
                continue  # a step without gradients
            (trains, ours), (also, theirs) = samples[group[0]], samples[holder]
            if trains != also:
                raise ValueError(
                    f"tied parameters differ in requires_grad: {_text(group[0])} has {trains}, "
                    f"{_text(holder)} has {also}."
                )
            allowed = _MAX_DRIFT * max(map(abs, ours), default=0.0)
            for x, y in zip(ours, theirs, strict=True):
                if x == y or (x != x and y != y) or abs(x - y) <= allowed:
                    continue
                raise ValueError(
                    f"tied parameters are no longer equal: {_text(group[0])} has a value of "
                    f"{x:.6g} where {_text(holder)} has {y:.6g}. Load the same state into both, "
                    "and let the optimizer treat them alike."
                )

"""Where sessions come from: opened for a ``Pipeline``, kept and found again for ``run_pipeline``.

The cache holds modules and process groups weakly: it never keeps a model alive.
"""

import contextlib
import logging
import os
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from rrfp.build_turns import build_turn
from rrfp.device import place_on_gpus, stage_device
from rrfp.given_lists import drawn, is_list
from rrfp.layout import (
    check_modules,
    check_stages_complete,
    check_transport,
    make_layout,
    stage_table,
)
from rrfp.local_session import LocalSession
from rrfp.process_set_up import open_process_session, refuse_set_up
from rrfp.rendezvous import membership
from rrfp.session import check_not_forked
from rrfp.stage_meetings import NO_MEETINGS, check_meetings, refuse_wrappers
from rrfp.tied import check_holders, describe_holders, mark_copies

logger = logging.getLogger("rrfp")


def _distributed():
    """torch.distributed when it has been initialised, else None."""
    dist = torch.distributed
    return dist if dist.is_available() and dist.is_initialized() else None


def _lives_here(stages):
    return _distributed() is None or isinstance(stages, (list, tuple, torch.nn.ModuleList))


def _check_launch(stages):
    """All stages in one process, though there are several: a mistake, or worth a word.

    Returns that word; empty where this process is the only one.
    """
    dist = _distributed()
    num_processes = os.environ.get("WORLD_SIZE", "1") if dist is None else dist.get_world_size()
    if not str(num_processes).isdigit() or int(num_processes) < 2:
        return ""
    if dist is None and not isinstance(stages, (list, tuple, torch.nn.ModuleList)):
        raise ValueError(
            f"this process is one of {num_processes} (WORLD_SIZE), but torch.distributed is not "
            "initialised; call torch.distributed.init_process_group() before rrfp. For a pipeline "
            "of its own in every process, pass the list of all stages."
        )
    note = (
        f"stages is a list, so this process, one of {num_processes}, runs a whole pipeline of its "
        "own; for one pipeline over all processes, pass this rank's stage as a module or "
        "{stage_index: module}, with torch.distributed initialised."
    )
    logger.warning("%s", note)
    return " " + note


def shape_of(placement, edges, loss_stages, tied):
    """The arguments that every rank must give alike when a pipeline is set up; drawn once."""
    edges = drawn("edges", edges) if is_list(edges) else edges
    loss_stages = drawn("loss_stages", loss_stages) if is_list(loss_stages) else loss_stages
    if is_list(tied):
        tied = [drawn("tied", item) if is_list(item) else item for item in drawn("tied", tied)]
    return {"placement": placement, "edges": edges, "loss_stages": loss_stages, "tied": tied}


@contextlib.contextmanager
def refused_together(stages, group, set_up_timeout_s):
    """Inside, arguments of a set-up are read that can fail on one rank alone; the others, who wait
    for it in theirs, are told. So are the members of ``agreement_group``, once that is set on what
    is yielded."""
    known = SimpleNamespace(agreement_group=None)
    try:
        yield known
    except Exception as error:  # also what the caller's own iterators raise
        if _lives_here(stages):
            raise
        check_not_forked()
        refuse_set_up(error, group, set_up_timeout_s, known.agreement_group)


def open_session(
    stages, shape, num_ranks, group, agreement_group, transport, set_up_timeout_s
):
    """({stage: module} of this process, a new session)."""
    check_not_forked()
    if not _lives_here(stages):
        return open_process_session(
            stages, shape, num_ranks, group, transport, set_up_timeout_s, agreement_group
        )
    launch_note = _check_launch(stages)
    if agreement_group not in (None, NO_MEETINGS):
        raise ValueError(
            "agreement_group is given, but all stages are in this process, where two members "
            "would share one device and their collectives wait for each other. Run one process "
            f"per rank, or leave it at None.{launch_note}"
        )
    if group is not None:
        raise ValueError(
            f"group is given, but all stages are in this process; leave it at None.{launch_note}"
        )
    check_transport(transport, ("auto", "local"))
    if isinstance(stages, torch.nn.Sequential) and len(stages) > 1:
        logger.warning(
            "stages is one nn.Sequential of %d modules, which runs as a single stage; for a "
            "pipeline pass a list of stages, such as list(stages), else [stages].", len(stages),
        )
    modules = stage_table(stages)
    check_stages_complete([list(modules)])
    layout = make_layout(len(modules), num_ranks, **shape)
    check_modules(modules)
    refuse_wrappers(modules)
    if agreement_group is None:
        check_meetings(modules, (), (), in_one_process=True)
    devices = place_on_gpus(layout, {s: stage_device(s, m) for s, m in modules.items()})
    check_holders(layout.tied, describe_holders(layout.tied, modules), layout.num_stages)
    mark_copies(layout.tied, modules)
    session = LocalSession(layout, devices)
    session.launch_note = launch_note
    return modules, session


class _CacheEntry:
    """A session, its modules and process group weakly: when one goes, the session is closed."""

    def __init__(self, session, modules, group):
        self.session = session
        self._group = None if group is None else weakref.ref(group)
        self._modules = {stage: weakref.ref(module) for stage, module in modules.items()}
        for module in modules.values():
            finalizer = weakref.finalize(module, _close_orphan, weakref.ref(session))
            finalizer.atexit = False

    def modules(self, group):
        """``{stage: module}``, or None when the session cannot be used with this group any more."""
        if self._group is not None and self._group() is not group:
            self.session.close("its process group was destroyed")
        modules = {stage: reference() for stage, reference in self._modules.items()}
        return modules if self.is_usable() else None

    def is_usable(self):
        gone = any(reference() is None for reference in self._modules.values())
        return self.session.closed_because is None and not gone


def _close_orphan(session_reference):
    session = session_reference()
    if session is not None:
        session.close("a stage was deleted")


_cache = {}


def _identity(stages):
    """What makes two ``stages`` arguments the same; None for what is no such argument."""
    if isinstance(stages, torch.nn.Module) and not isinstance(stages, torch.nn.ModuleList):
        return ("module", id(stages))
    if isinstance(stages, Mapping):
        return ("dict", *((stage, id(module)) for stage, module in stages.items()))
    if isinstance(stages, (list, tuple, torch.nn.ModuleList)):
        return ("list", *(id(module) for module in stages))
    return None


def cached_session(
    stages, shape, num_ranks, group, agreement_group, transport, set_up_timeout_s
):
    """(session, {stage: module}) for run_pipeline, built anew when there is none that fits."""
    here = _lives_here(stages)
    # A text is the same whichever object holds it.
    groups = (id(group),
              agreement_group if isinstance(agreement_group, str) else id(agreement_group))
    with refused_together(stages, group, set_up_timeout_s) as known:
        known.agreement_group = agreement_group
        key = (_identity(stages), repr(shape), repr(num_ranks), groups, repr(transport), here)
    joined = None if here else group if group is not None else _distributed().group.WORLD
    found = _look_up(key, joined)
    if found is not None:
        return found
    place = () if here else membership(joined).ranks
    with build_turn(place, set_up_timeout_s) as left_s:
        found = _look_up(key, joined)
        if found is not None:
            return found  # another thread has built it meanwhile
        for stale in [k for k, e in list(_cache.items()) if not e.is_usable()]:
            _cache.pop(stale, None)
        modules, session = open_session(
            stages, shape, num_ranks, group, agreement_group, transport, left_s
        )
        _cache[key] = _CacheEntry(session, modules, joined)
        return session, modules


def _look_up(key, group):
    """(session, {stage: module}) as it was built before; None when that cannot be used."""
    entry = _cache.get(key)
    modules = entry.modules(group) if entry is not None else None
    return None if modules is None else (entry.session, modules)

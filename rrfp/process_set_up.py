"""How a process finds the other ranks of its pipeline, and joins them in a session."""

import contextlib
from collections.abc import Mapping
from numbers import Integral

import torch

from rrfp import _C
from rrfp.agreement_group import SET_UP_GRACE_S, GroupSetUp
from rrfp.device import stage_device
from rrfp.errors import RankTimeoutError
from rrfp.layout import check_modules, check_transport, stage_table
from rrfp.process_layout import lay_out
from rrfp.process_session import ProcessSession, close_pipelines_of
from rrfp.rank_cards import RanksParted, check_cards
from rrfp.rendezvous import RefusedElsewhere, Rendezvous, master_host, membership
from rrfp.settings import SETTINGS
from rrfp.stage_meetings import NO_MEETINGS, check_meetings, refuse_wrappers
from rrfp.tied import describe_holders, mark_copies, normalise_tied
from rrfp.value_text import class_name, error_text, key_text

_REFUSED_AGREEMENT = "refused agreement"
# To form agreement groups; each beyond the first needs a linked pipeline that began anew meanwhile.
_MOST_TURNS = 3


def open_process_session(
    stages, shape, num_ranks, group, transport, set_up_timeout_s, agreement_group=None
):
    """({stage: module} of this rank, a session joined to all ranks of the group).

    Raises:
        ValueError, TypeError: The same on every rank, whatever rank it is about.
        RankTimeoutError: A rank did not come.
    """
    with _set_ups(group, set_up_timeout_s, agreement_group) as (rendezvous, agreement):
        says_none = agreement_group == NO_MEETINGS
        return _join(stages, shape, num_ranks, transport, rendezvous, agreement, says_none)


@contextlib.contextmanager
def _set_ups(group, timeout_s, agreement_group):
    """The set-up of the pipeline and that of its agreement group or None, begun at once: whoever
    waits in one hears of what becomes of the other."""
    member = membership(group)
    rendezvous, agreement = None, None
    try:
        with contextlib.ExitStack() as begun:
            rendezvous = begun.enter_context(Rendezvous(member, timeout_s))
            if agreement_group not in (None, NO_MEETINGS):
                agreement = begun.enter_context(GroupSetUp(agreement_group, rendezvous, timeout_s))
            yield rendezvous, agreement
    except BaseException as error:
        if rendezvous is not None:
            rendezvous.see_off(error)
        if agreement is not None:
            agreement.see_off(error)
        raise


def _leave_refused(refusal, rendezvous, agreement):
    """Every rank of the pipeline knows of the refusal; members of the agreement group may not."""
    rendezvous.refusal = refusal
    if isinstance(refusal, RanksParted):
        close_pipelines_of(rendezvous.member.ranks)
    if agreement is not None:
        agreement.withdraw(refusal)


def _join(stages, shape, num_ranks, transport, rendezvous, agreement, says_none):
    member = rendezvous.member
    listener = None
    card = {"error": None}
    card["agreement"] = "none" if agreement is None else f"of {agreement.member.num_ranks} ranks"
    modules, cause = None, None
    try:
        card.update((name, key_text(value)) for name, value in shape.items())
        check_transport(transport, ("auto", "ipc", "nccl", "socket", "tcp"))
        host = _C.choose_host(master_host(), SETTINGS.socket_interfaces)
        listener = _C.SocketListener(host, with_unix=transport != "tcp")
        card["address"] = listener.address
        if not _is_number_of(num_ranks, member):
            raise ValueError(
                f"num_ranks is {num_ranks!r}, but the group has {member.num_ranks} ranks; leave "
                "it at None."
            )
        _refuse_no_stage(stages, member)
        modules = stage_table(stages, default_stage=member.rank)
        check_modules(modules)
        refuse_wrappers(modules)
        if not says_none:
            check_meetings(modules, member.ranks, agreement.member.ranks if agreement else ())
        card["stages"] = list(modules)
        devices = {stage: stage_device(stage, module) for stage, module in modules.items()}
        card["devices"] = {s: d and str(d) for s, d in devices.items()}
        card["tied parameters"] = describe_holders(normalise_tied(shape["tied"]), modules)
    except Exception as error:  # it cannot listen, or what was given raises when it is looked at
        cause = error
        card["error"] = _refusal_of(error)
    cards = rendezvous.exchange(card)
    try:
        layout, devices = lay_out(cards, member, shape, transport)
    except (ValueError, TypeError) as error:
        _leave_refused(error, rendezvous, agreement)
        raise error from cause
    segment = None
    if agreement is not None:
        segment = _form_agreement(agreement, rendezvous, list(modules))
    if devices is not None:
        devices = {stage: devices[stage] for stage in modules}
    addresses = [c["address"] for c in cards]
    mark_copies(layout.tied, modules)
    return modules, ProcessSession(
        layout, devices, rendezvous, listener, addresses, transport, segment
    )


def _refuse_no_stage(stages, member):
    """A rank that was given nothing: most likely there are more processes than stages."""
    is_table = isinstance(stages, (Mapping, torch.nn.ModuleDict))
    if stages is None or (is_table and not stages):
        raise ValueError(
            f"stages is {stages!r}, but each of the {member.num_ranks} ranks of a pipeline has a "
            "stage at least. Cut the model into more, start fewer processes, or leave this one "
            "out: the others then pass group=, a process group without it, and it does not call."
        )


def _is_number_of(num_ranks, member):
    return num_ranks is None or (
        isinstance(num_ranks, Integral) and num_ranks == member.num_ranks
    )


def _refusal_of(error):
    """(name of the error that all ranks raise for it, its text)."""
    name, text = class_name(error), error_text(error)
    if not isinstance(error, (ValueError, TypeError, RuntimeError)):
        text = f"{name}: {text}"
    return ("TypeError" if isinstance(error, TypeError) else "ValueError", text)


def refuse_set_up(error, group, timeout_s, agreement_group):
    """This rank has failed before its set-up: it takes part in one, for all ranks to hear why.

    Raises:
        ValueError, TypeError: The same on every rank, those included that are in a step.
        RankTimeoutError: A rank did not come.
    """
    with _set_ups(group, timeout_s, agreement_group) as (rendezvous, agreement):
        cards = rendezvous.exchange({"error": _refusal_of(error)})
        try:
            check_cards(cards, ())
        except (ValueError, TypeError) as refusal:
            _leave_refused(refusal, rendezvous, agreement)
            raise refusal from error


def _form_agreement(agreement, rendezvous, stages):
    """The memory of this rank's agreement group; every rank of the pipeline must have got one.

    A group may have been formed with a member whose pipeline has ended that set-up since, while
    another rank's was formed with a member that is in the next one. Such pipelines would take
    each other down in turn, for ever: so who is behind forms its group anew.
    """
    segment, cause, failure = None, None, None

    def watch():
        refusal = rendezvous.word(_REFUSED_AGREEMENT)
        if refusal is not None:
            raise RefusedElsewhere(refusal)

    is_behind = True
    for turn in range(_MOST_TURNS):
        try:
            if turn and is_behind:
                segment = None  # of a group of which a member has left
                agreement.begin(rendezvous.time_left_ms() / 1000)
            if is_behind:
                segment = agreement.form(stages, watch)
        except RefusedElsewhere as error:
            cause = error
        except (ValueError, RankTimeoutError) as error:
            cause, failure = error, (isinstance(error, ValueError), str(error))
            if failure[0]:
                rendezvous.leave_word(
                    _REFUSED_AGREEMENT, f"rank {rendezvous.member.rank}: {error}"
                )
        all_met = _all_formed(rendezvous, turn, failure, agreement.met, cause)
        latest = {}
        for pipeline, number in (item for met in all_met for item in met.items()):
            latest[pipeline] = max(number, latest.get(pipeline, number))
        behind = [any(met[each] < latest[each] for each in met) for met in all_met]
        if not any(behind):
            return segment
        is_behind = behind[rendezvous.member.rank]
    rendezvous.refusal = RankTimeoutError(
        f"rank {behind.index(True)}: the pipelines that share its agreement group began other "
        f"set-ups {_MOST_TURNS} times while this one went on.", rank=behind.index(True)
    )
    raise rendezvous.refusal


def _all_formed(rendezvous, turn, failure, met, cause):
    """By rank of the pipeline: which set-ups its agreement group was formed in.

    Raises:
        ValueError, RankTimeoutError: The same on every rank: one has none.
    """
    # Longer than the others wait in their agreement groups, for them to say who is missing there.
    said = rendezvous.share(f"agreement {turn}", (failure, met), grace_s=2 * SET_UP_GRACE_S)
    failed = [(rank, *other) for rank, (other, _) in enumerate(said) if other is not None]
    if failed:  # a refusal comes first: who waited in vain may have done so because of it
        rank, is_refusal, text = next((each for each in failed if each[1]), failed[0])
        kind = ValueError if is_refusal else RankTimeoutError
        rendezvous.refusal = kind(f"rank {rank}: {text}")
        raise rendezvous.refusal from cause
    return [met for _, met in said]

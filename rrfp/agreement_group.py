"""Agreement groups: ranks of several pipelines that hold the same stages and run one order.

Such ranks meet in collectives inside a task (tensor, context or expert parallelism, sharded
parameters), so all must run the same tasks in the same order, although their messages come at
different moments. The order is decided in memory that they share, task by task; here is how they
find one another, and how they compare what a step is to be.
"""

import contextlib
import dataclasses
import hashlib
import os
import pickle
import secrets

import torch

from rrfp import _C
from rrfp.errors import ClosedError, PeerLostError, RankTimeoutError
from rrfp.group_claims import GroupClaims
from rrfp.rank_cards import RanksParted
from rrfp.rendezvous import RefusedElsewhere, Rendezvous, membership
from rrfp.stage_meetings import NO_MEETINGS
from rrfp.value_text import nearest

# Dimensions of a DeviceMesh whose ranks meet inside a stage.
_INNER_DIMENSIONS = ("tp", "cp", "ep")
_PIPELINE_DIMENSION = "pp"
_LONGEST_VALUE = 200
_LONGEST_REFUSAL = 4000
# Members are in other pipelines, whose ranks wait for one another first; so long after the time-out
# one still hears who is missing there, before a step and in a set-up.
_GRACE_S = 10.0
SET_UP_GRACE_S = 5.0


def _boot_id():
    """The same for all processes of one host that runs."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _is_mesh(value):
    return isinstance(value, torch.distributed.device_mesh.DeviceMesh)


def _of_mesh(mesh, names):
    """The process group of this rank over some dimensions of a mesh."""
    part = mesh[names] if len(names) > 1 else mesh[names[0]]
    return (part._flatten() if len(names) > 1 else part).get_group()


def _is_distributed():
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized()


def pipeline_group(group):
    """The process group of a pipeline, None for all processes.

    ``group`` may be a DeviceMesh with a dimension ``"pp"``.

    Raises:
        TypeError, ValueError: Neither a group nor such a mesh.
    """
    dist = torch.distributed
    if not _is_distributed():
        return group
    if _is_mesh(group):
        names = group.mesh_dim_names or ()
        if _PIPELINE_DIMENSION not in names:
            raise ValueError(
                f"group is a DeviceMesh with the dimensions {names}; it needs one named 'pp', "
                "the ranks of a pipeline."
            )
        return _of_mesh(group, (_PIPELINE_DIMENSION,))
    if not (group is None or group is dist.GroupMember.NON_GROUP_MEMBER
            or isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group is {group!r}, a {type(group).__name__}; pass a process group (what "
            "torch.distributed.new_group([0, 1]) returns), a DeviceMesh with a dimension 'pp', or "
            "None for all processes."
        )
    return group


def resolve_agreement_group(agreement_group, group):
    """The agreement group as a process group, or None, as which one of one rank counts.

    It may be ``"auto"`` where ``group``, the caller's, is a DeviceMesh: the dimensions tp, cp and
    ep that the mesh has. NO_MEETINGS comes back as it is.

    Raises:
        TypeError, ValueError: Neither a group, a mesh nor ``"auto"``, or not enough to go by.
    """
    dist = torch.distributed
    is_named = isinstance(agreement_group, str)
    if agreement_group is None or (is_named and agreement_group == NO_MEETINGS):
        return agreement_group if _is_distributed() else None
    if not _is_distributed():
        raise ValueError(
            "agreement_group is given, but torch.distributed is not initialised; its members "
            "are processes."
        )
    if is_named:
        if agreement_group != "auto":
            raise ValueError(
                f"agreement_group is {agreement_group!r}; pass a process group, a DeviceMesh, "
                f"'auto', '{NO_MEETINGS}' or None."
                + nearest(agreement_group, ("auto", NO_MEETINGS))
            )
        if not _is_mesh(group):
            raise ValueError(
                "agreement_group is 'auto', which reads a DeviceMesh; pass the mesh as group "
                "(init_device_mesh with the dimensions 'pp' and 'tp'), or a process group."
            )
        inner = tuple(name for name in _INNER_DIMENSIONS if name in group.mesh_dim_names)
        if not inner:
            return None
        agreement_group = _of_mesh(group, inner)
    elif _is_mesh(agreement_group):
        agreement_group = agreement_group.get_group()
    elif not isinstance(agreement_group, dist.ProcessGroup):
        raise TypeError(
            f"agreement_group is a {type(agreement_group).__name__}; pass a process group, a "
            "DeviceMesh, 'auto' or None."
        )
    if dist.get_rank(agreement_group) < 0:
        raise ValueError("this process is not a member of agreement_group.")
    return None if dist.get_world_size(agreement_group) == 1 else agreement_group


class GroupSetUp:
    """One attempt to form an agreement group, by every member of it.

    As a context: a member that leaves with an exception before it formed the group tells the
    others that it will not come.

    Attributes:
        met: {pipeline of a member: the number of its set-up} of the group as it was formed last.
    """

    def __init__(self, group, pipeline, timeout_s):
        self._pipeline = pipeline  # the set-up of this rank's pipeline
        self.member = membership(group)
        self.met = {}
        self.begin(timeout_s)

    def begin(self, timeout_s):
        """The first attempt, or another after one that formed the group."""
        self.meeting = Rendezvous(self.member, timeout_s, "agreement group")
        with self.meeting.store_reachable():
            self._claims = GroupClaims(self.member, self.meeting.corner, self.meeting.store)
        self._is_over, self._is_formed, self._segment = False, False, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None and not self._is_over:
            with contextlib.suppress(PeerLostError, ClosedError):  # nobody to tell
                self._end(has_failed=True)
            self.meeting.__exit__(kind, error, trace)

    def see_off(self, error):
        """As the meeting does; for members that go on in their pipelines with a group that was
        formed, only the process that may hold the store stays, usually global rank 0."""
        self.meeting.see_off(error, not self._is_formed or torch.distributed.get_rank() == 0)

    def withdraw(self, error):
        """Tell the other members, who may be in pipelines without it, why this one cannot."""
        if self.meeting.is_late or isinstance(error, RanksParted):
            # They have given up the attempt that this is about, or are in a step and not in it; in
            # the next one they would take the reason for one against it.
            error = RefusedElsewhere(str(error))
            self.__exit__(type(error), error, None)
            return
        with self.meeting:
            self._refuse(error)
            self._end(has_failed=True)

    def _end(self, has_failed):
        self._is_over, self._is_formed = True, not has_failed
        with self.meeting.store_reachable():
            self._claims.end(has_failed)

    def _refuse(self, error):
        with self.meeting.store_reachable():
            # Looked up first: whoever has heard of this may try again with another group.
            others = self._claims.others()
            self.meeting.publish("card", {"error": str(error)})
            for claim in others:
                self._claims.refuse(claim, str(error))

    def _check_claims(self):
        """Two groups that name one rank cannot both be formed."""
        claim = self._claims.rival()
        if claim is None:
            return
        own = self.member.ranks[self.member.rank]
        raise ValueError(
            f"the ranks disagree on agreement_group: global rank {claim['rank']} gives "
            f"{list(claim['ranks'])}, global rank {own} gives {list(self.member.ranks)}. Every "
            "member must give the same ranks."
        )

    def form(self, stages, watch):
        """The shared memory of the group, ready for ``_C.connect``.

        ``watch`` is called while this rank waits for members, and may raise.

        Raises:
            ValueError: The same on every member: they do not fit, or share no memory. Also ranks
                that name different groups.
            RankTimeoutError: A member did not come.
        """
        has_failed = True
        with self.meeting:
            try:
                cards = self._exchange_cards(stages, watch)
                self._check(cards)
                self._share_memory()
                self.met = {card["pipeline"]: card["set-up"] for card in cards}
                has_failed = False
                return self._segment
            except ValueError as error:
                self.meeting.refusal = error
                raise
            finally:
                self._segment = None  # which no error keeps by its traceback
                self._end(has_failed)

    def _exchange_cards(self, stages, watch):
        def look():
            self._check_claims()
            watch()

        card = {
            "error": None,
            "pipeline": self._pipeline.member.ranks,
            "set-up": self._pipeline.number,
            "rank": self._pipeline.member.rank,
            "stages": list(stages),
            "boot_id": _boot_id(),
            "version": _C.build_info()["version"],
        }
        try:
            cards = self.meeting.share("card", card, look, SET_UP_GRACE_S)
            for rank, other in zip(self.member.ranks, cards):
                if other["error"] is not None:
                    raise ValueError(
                        f"global rank {rank}, a member of this rank's agreement group: "
                        f"{other['error']}"
                    )
        except ValueError as error:
            if error is not self.meeting.refusal:  # which the others know
                self._refuse(error)
                own = self.member.ranks[self.member.rank]
                text = f"global rank {own}, a member of this rank's agreement group: {error}"
                self.meeting.leave(text, is_refusal=True)  # for who has read a better card
            raise
        return cards

    def _share_memory(self):
        member, meeting = self.member, self.meeting
        refusal = self._map_memory()
        token = secrets.randbits(64)
        if self._segment is not None:
            self._segment.sign(member.rank, token)
        signed = meeting.share("signed", (token, os.getpid(), refusal))
        for rank, (token, _, other_refusal) in enumerate(signed):
            if refusal is None and other_refusal is None:
                if not self._segment.is_signed(rank, token):
                    refusal = f"member {rank} has signed other memory than member {member.rank}"
        verdicts = meeting.share("verdict", refusal)
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                raise ValueError(
                    f"the ranks {list(member.ranks)} of agreement_group share no memory: member "
                    f"{rank} found that {verdict}. Run them in one container, or in containers "
                    "that share process ids, with a few MiB of memory to spare."
                )
        names = [f"global rank {rank}" for rank in member.ranks]
        self._segment.join(member.rank, names, [pid for _, pid, _ in signed])

    def _check(self, cards):
        ranks = self.member.ranks
        for member, card in enumerate(cards):
            for name, what in (
                ("boot_id", "hosts"),
                ("version", "versions of rrfp"),
                ("stages", "stages"),
                ("rank", "places in their pipelines"),
            ):
                if card[name] != cards[0][name]:
                    hint = (
                        "agreement groups across hosts are not supported yet; keep each on one"
                        if name == "boot_id"
                        else "its members hold the same stages of pipelines of the same shape"
                    )
                    raise ValueError(
                        f"agreement_group joins ranks on different {what}: global rank {ranks[0]} "
                        f"has {cards[0][name]!r}, global rank {ranks[member]} has {card[name]!r}. "
                        f"Note: {hint}."
                    )
            shared = set(card["pipeline"]) & set(ranks)
            if shared != {ranks[member]}:
                raise ValueError(
                    f"agreement_group {list(ranks)} and the pipeline {list(card['pipeline'])} "
                    f"share the global ranks {sorted(shared)}; members of an agreement group are "
                    "in different pipelines. Pass the pipeline's own ranks as group."
                )

    def _map_memory(self):
        """None, or why there is no memory."""
        num_members, place = self.member.num_ranks, None
        if self.member.rank == 0:
            nonce = secrets.randbits(64)
            try:
                self._segment = _C.make_agreement_segment(num_members, nonce)
                place = (os.getpid(), self._segment.fd, nonce)
            except RuntimeError as error:  # of the system: no memory, no descriptor
                place = str(error)
        place = self.meeting.share("memory", place)[0]
        if isinstance(place, str):
            return f'member 0 could get none: "{place}"'
        pid, fd, nonce = place
        if self._segment is None:
            try:
                self._segment = _C.open_agreement_segment(pid, fd, num_members, nonce)
            except ValueError as error:
                return str(error)
        return None


def _short(value):
    text = repr(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{len(value) if hasattr(value, '__len__') else 1} items with the digest {digest}"


def settle(runtime, answer, request, counter, timeout_s):
    """What all members of the group make of their pipelines' answers for a step.

    ``answer`` is a Decision or (name of error, text). Where all have decided the same, it is the
    Decision, with the seed of member 0 unless the caller gave one; else a refusal, the same on
    every member.

    Raises:
        RankTimeoutError: A member did not come.
        StatusError: The run has ended.
    """
    is_refusal = isinstance(answer, tuple)
    card = {"refusal": None, "seed": None}
    if is_refusal:
        card["refusal"] = (answer[0], answer[1][:_LONGEST_REFUSAL])
    else:
        card["options"] = {
            field.name: _short(getattr(answer, field.name))
            for field in dataclasses.fields(answer)
            if field.name != "seed"
        }
        card["options"]["grad_scale"] = repr(request.grad_scale)
        card["options"]["the steps run so far"] = repr(counter)
        card["options"]["seed"] = repr(request.seed)
        card["options"]["the log of the last step"] = repr(runtime.agreement_digest)
        card["seed"] = answer.seed
    cards = runtime.exchange_cards(pickle.dumps(card), int(1000 * (timeout_s + _GRACE_S)))
    if cards is None:
        text = (
            f"{', '.join(runtime.owing_members())} did not enter the step within "
            f"{timeout_s + _GRACE_S:g} s of rank {runtime.rank}, a member of the same agreement "
            f"group. Every member must call its pipeline for every step. {runtime.describe()}"
        )
        runtime.abort(_C.StatusCode.TIMED_OUT, -1, text)
        raise RankTimeoutError(text, rank=None)
    cards = [pickle.loads(each) for each in cards]
    for member, other in enumerate(cards):
        if other["refusal"] is not None:
            name, text = other["refusal"]
            return answer if is_refusal else (name, f"member {member} of the group: {text}")
    for member, other in enumerate(cards):
        for name, value in other["options"].items():
            if value != cards[0]["options"].get(name):
                return "ValueError", (
                    f"the members of an agreement group disagree on {name}: member 0 has "
                    f"{cards[0]['options'].get(name)}, member {member} has {value}. Pass the same "
                    "value to every pipeline."
                )
    return dataclasses.replace(answer, seed=cards[0]["seed"])

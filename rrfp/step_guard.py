"""The guard of hint "auto" where the in-flight limit is tight: would its order be faster as it is?

What the last steps took on all ranks is simulated for the rule, for its order run as it stands
and for that order with slack 2 (``csrc/sim/guard.hpp``). One rank learns and chooses, in a thread
of its own while the next step begins; the choice is part of the decision that all ranks share.
"""

import logging
import threading
from collections import deque
from dataclasses import replace

from rrfp import _C
from rrfp.hints import slack_of
from rrfp.thread_room import check_room

logger = logging.getLogger("rrfp")

NUM_STEPS = 8  # the guard has a say from the step after so many
_EVERY = 4     # then it learns from one step in so many
_KINDS = "FBIW"  # as the core counts them


class StepGuard:
    """What one rank knows of the last steps of a pipeline, and what follows from it.

    Nothing here blocks: a choice that is not made yet is that of the step before.
    """

    def __init__(self, layout):
        self.layout = layout
        self._records = deque(maxlen=NUM_STEPS)
        self._key = None  # what must be the same for records to say something about a step
        self._num_decided = 0
        self._choice = None  # (hint, slack)
        self._thread = None

    def decide(self, decision):
        """The decision for a step that is guarded, with the choice of the guard in it."""
        key = replace(decision, microbatch_order=(), weights=(), seed=0, costs=())
        if key != self._key:
            self._key, self._choice, self._num_decided = key, None, 0
            self._records = deque(maxlen=NUM_STEPS)
        self._num_decided += 1
        gathers = self._num_decided <= NUM_STEPS or self._num_decided % _EVERY == 0
        decision = replace(decision, gathers_times=gathers)
        choice = self._choice
        if choice is None or choice[0] == decision.hint:
            return decision
        return replace(decision, hint=choice[0], slack=choice[1])

    def learn(self, plan, costs, rows_of_rank):
        """Take in a step whose plan, before the guard, was ``plan``; chooses for the next.

        ``rows_of_rank[r]``: (task text, ready, claimed, retired) of rank r, in ns.
        """
        if self._thread is not None and self._thread.is_alive():
            self._num_decided -= 1  # it lags behind: this step is not counted
            return
        args = (self._key, self._records, plan, list(costs), rows_of_rank)
        thread = threading.Thread(target=self._learn, args=args, name="rrfp-guard", daemon=True)
        try:
            check_room()
            thread.start()
        except (OSError, RuntimeError) as error:  # the other ranks have returned from the step
            logger.warning("the guard of hint auto could not choose; the rule goes on: %s", error)
            return
        self._thread = thread  # now: another thread may close, and wait for it

    def wait(self, timeout_s=None):
        """Until the last choice is made, unless the thread that makes it calls: what it collects
        may close the pipeline."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout_s)

    def _learn(self, key, records, plan, costs, rows_of_rank):
        choice = None
        try:
            records.append(step_record(self.layout.num_stages, rows_of_rank, costs))
            if len(records) == NUM_STEPS:
                choice = _C.guard(plan, list(records), costs, NUM_STEPS)
        except Exception:
            logger.exception("the guard of hint auto could not choose; the rule goes on")
        if key is not self._key:
            return  # of a step like those before a change
        if choice is not None and choice != self._choice:
            hint, slack = choice
            logger.info("the guard of hint auto has %s run from now on", "its rule"
                        if hint == "auto" else f"{hint}, slack {slack_of(slack)},")
        self._choice = choice


def rows(rank_step):
    """What ``learn`` wants to know of a rank's step."""
    return [(text, ready, claimed, retired) for text, ready, claimed, retired, _ in
            rank_step.records]


def step_record(num_stages, rows_of_rank, costs):
    """(num_microbatches, durations, travels, costs), as ``_C.guard`` takes it.

    The ranks' clocks may differ by any constant. What goes up between two ranks and what comes
    down sees that difference with opposite signs; the quickest of each are taken to have
    travelled alike.
    """
    tasks = {}
    for of_rank in rows_of_rank:
        for text, ready, claimed, retired in of_rank:
            stage, kind, microbatch = _C.parse_task(text)
            tasks[kind, stage, microbatch] = (ready, claimed, retired)
    num_microbatches = 1 + max(microbatch for _, _, microbatch in tasks)
    raw = {}  # by (lower stage, goes up)
    for (kind, stage, microbatch), (_, _, retired) in tasks.items():
        step = {"F": 1, "B": -1, "I": -1}.get(kind, 0)
        target = tasks.get((kind, stage + step, microbatch)) if step else None
        if target is not None:
            edge = (min(stage, stage + step), step > 0)
            raw.setdefault(edge, {})[kind, stage, microbatch] = target[0] - retired
    travels = {}
    for (lower, goes_up), values in raw.items():
        back = raw.get((lower, not goes_up), {})
        ahead = (min(values.values()) - min(back.values())) / 2 if back else 0
        for task, value in values.items():
            travels[task] = max(0, round(value - ahead))
    places = [(kind, stage, microbatch) for kind in _KINDS for stage in range(num_stages)
              for microbatch in range(num_microbatches)]
    durations = [tasks[p][2] - tasks[p][1] if p in tasks else -1 for p in places]
    return num_microbatches, durations, [travels.get(p, -1) for p in places], costs

"""Whether ranks that are threads of one process take turns: found out by trying.

Threads whose tasks are short spend more on handing the GIL to each other, at every operation of
torch, than on the tasks; taking turns (``csrc/runtime/work_turn.hpp``) spares that. Threads whose
operations are long lose by it what they gain by running side by side. How short is short depends
on the machine. So steps are tried both ways, alternating, and the quicker way is kept.
"""

import os
from statistics import median

from rrfp.settings import SETTINGS

_SHORT_S = 300e-6     # a task, of all ranks together; where they are longer nothing is tried
_WARM_UP_STEPS = 3
_ROUNDS = 3
_LEAST_GAIN = 0.95    # of the time side by side
_STEPS_IN_TURN = 250  # until both ways are tried again
_STEPS_SIDE_BY_SIDE = 2500  # longer: a trial costs there
_MOST_OTHERS = 50     # steps of other kinds during a trial


class TurnTrial:
    """Which way the steps of a session run, from what the last ones took."""

    def __init__(self, num_ranks):
        self._may = SETTINGS.turns and num_ranks > 1 and len(os.sched_getaffinity(0)) > 1
        self._begin_anew()

    def _begin_anew(self):
        self._num_left = _WARM_UP_STEPS  # before the next trial
        self._takes_turns = False
        self._kind, self._num_others = None, 0
        self._took_s = {False: [], True: []}  # per task, by way

    def choose(self, kind):
        """Whether turns are taken in the coming step; only steps of one kind are compared, so that
        training and evaluation in turn do not pass for the two ways."""
        if self._num_left or not self._may:
            return self._takes_turns
        if self._kind is None:
            self._kind = kind
        side_by_side, in_turn = self._took_s.values()
        return kind == self._kind and len(in_turn) < len(side_by_side)

    def learn(self, kind, took_turns, took_s, num_tasks):
        """A step of so many tasks, of all ranks together, took so long."""
        if not self._may:
            return
        task_s = took_s / num_tasks
        if task_s > _SHORT_S:
            self._begin_anew()
        elif self._num_left:
            self._num_left -= 1
        elif kind != self._kind:
            self._num_others += 1
            if self._num_others > _MOST_OTHERS:
                self._begin_anew()
        else:
            self._took_s[took_turns].append(task_s)
            if len(self._took_s[True]) == _ROUNDS:
                side_by_side, in_turn = map(median, self._took_s.values())
                self._begin_anew()
                self._takes_turns = in_turn < _LEAST_GAIN * side_by_side
                self._num_left = _STEPS_IN_TURN if self._takes_turns else _STEPS_SIDE_BY_SIDE

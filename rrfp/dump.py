"""What the ranks of this process are doing now, for people who wonder why nothing moves."""

import collections
import json
import logging
import signal
import sys
import time

from rrfp.settings import SETTINGS

logger = logging.getLogger("rrfp")

NUM_DECISIONS = 32
_has_handler = False


class DecisionLog:
    """The last tasks that a rank chose. One thread adds, any thread reads."""

    def __init__(self):
        self._chosen = collections.deque(maxlen=NUM_DECISIONS)

    def add(self, step, tasks, local):
        self._chosen.append((step, tasks, local, time.monotonic()))

    def read(self):
        """[{step, task, seconds_ago}], the oldest first."""
        now = time.monotonic()
        while True:
            try:
                chosen = list(self._chosen)
                break
            except RuntimeError:  # added to meanwhile
                continue
        entries = []
        for step, tasks, local, chosen_s in chosen:
            stage, kind, microbatch = tasks[local]
            entries.append({"step": step, "task": f"{stage}{kind}{microbatch}",
                            "seconds_ago": round(now - chosen_s, 3)})
        return entries


def describe_ranks(runtimes, logs):
    """{"ranks": [{rank, peers, decisions}]}, plain values only."""
    ranks = []
    for runtime in runtimes:
        lines = runtime.describe().strip().split("\n")
        ranks.append({
            "rank": runtime.rank,
            "state": lines[0].partition("(this one) ")[2],
            "peers": lines[1:],
            "decisions": logs[runtime.rank].read(),
        })
    return {"ranks": ranks}


def dump_text(description, in_one_process):
    """The same for people; peers are left out where they are ranks of this process too."""
    lines = []
    for entry in description["ranks"]:
        lines.append(f"Rank {entry['rank']} {entry['state']}")
        if not in_one_process:
            lines += entry["peers"]
        chosen = ", ".join(d["task"] for d in entry["decisions"]) or "nothing yet"
        lines.append(f"  Rank {entry['rank']} chose last: {chosen}")
        if entry["decisions"]:
            last = entry["decisions"][-1]
            lines.append(f"  the last one in step {last['step']}, {last['seconds_ago']} s ago")
    return "\n".join(lines)


def dump_json(description):
    return json.dumps(description)


def install_handler(dump_all):
    """Answer RRFP_DUMP_SIGNAL, where it is set, with ``dump_all()`` on stderr; once a process."""
    global _has_handler
    if SETTINGS.dump_signal is None or _has_handler:
        return

    def answer(number, frame):
        sys.stderr.write(dump_all() + "\n")
        sys.stderr.flush()

    try:
        signal.signal(SETTINGS.dump_signal, answer)
        _has_handler = True
    except ValueError:  # Python takes handlers in the main thread alone
        logger.warning("RRFP_DUMP_SIGNAL is not answered: the pipeline was made outside the main "
                       "thread")

"""What the ranks of this process are doing now, for people who wonder why nothing moves."""

import json
import logging
import signal
import sys

from rrfp.settings import SETTINGS

logger = logging.getLogger("rrfp")

_has_handler = False


def describe_ranks(runtimes, in_one_process):
    """{"ranks": [...]} by rank, plain values only: see ``rank_views.hpp`` for what is in each.

    Ranks of other processes as this one has last heard of them.
    """
    if not in_one_process:
        return {"ranks": runtimes[0].views()}
    return {"ranks": [runtime.views()[runtime.rank] for runtime in runtimes]}


def dump_text(description):
    """The same for people: what each rank does, then what it chose last."""
    lines = []
    for entry in description["ranks"]:
        heard = entry["heard_seconds_ago"]
        ago = "" if heard is None else f", as last heard {heard:.1f} s ago"
        lines.append(f"Rank {entry['rank']} {entry['state']}{ago}.")
    lines.append("The last choices of each rank, seconds ago:")
    lines += [f"Rank {e['rank']}: {e['chosen'] or 'none'}" for e in description["ranks"]]
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

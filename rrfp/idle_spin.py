"""How long an idle worker looks for its next task before it sleeps.

To be woken takes the kernel tens of microseconds; to look takes a core. Where this process may
use several cores for each rank of this host, and one for each thread that torch computes with, one
of them is spared for some milliseconds at a time. Elsewhere the look is about as long as a wake-up
takes, and yields to whatever else wants to run: an operation that is spread over all cores is as
slow as its slowest.
"""

import os

import torch

from rrfp.settings import SETTINGS

_CORES_PER_RANK = 3  # so that the spinning one is not missed by the others' computation
_SPARE_CORE_US = 5000
_SCARCE_CORE_US = 50


def idle_spin(num_ranks_here):
    """(microseconds, whether to yield in between); RRFP_SPIN_US is taken as it is."""
    if SETTINGS.spin_us is not None:
        return SETTINGS.spin_us, False
    per_rank = max(_CORES_PER_RANK, torch.get_num_threads())
    if len(os.sched_getaffinity(0)) >= per_rank * num_ranks_here:
        return _SPARE_CORE_US, False
    return _SCARCE_CORE_US, True


def count_ranks_here(address, addresses):
    """How many ranks' published addresses name the host that ``address`` does."""
    return sum(_host(other) == _host(address) for other in addresses)


def _host(address):
    return address.rpartition("tcp:")[2].rpartition(":")[0] if "tcp:" in address else ""

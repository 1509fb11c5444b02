"""Stages on GPUs: which device a stage is on, how its tasks are launched, how ranks are joined.

Nothing here reads what a device has computed. A worker launches a task, sends its outputs with
the point on the stream at which they exist, and goes on; the core sees the device pass.
"""

import contextlib
import logging
import os
import threading

import torch

from rrfp import _C
from rrfp.errors import DeviceError, error_from_status
from rrfp.free_multiprocessors import left_free, refuse_too_many
from rrfp.settings import SETTINGS
from rrfp.shared_device import SharedParcels

logger = logging.getLogger("rrfp")

_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None without CUDA
_LOOKAHEAD = {"jit": _C.Lookahead.JIT, "eager": _C.Lookahead.EAGER, 1: _C.Lookahead.NONE}


def stage_device(stage, module):
    """The device that all tensors of a stage are on; None for a stage without tensors.

    Raises:
        ValueError: Two devices in one stage, a device that is neither CPU nor CUDA, or a CUDA
            device that this build cannot use.
    """
    owner, device = None, None
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if device is None:
            owner, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"stage {stage} is on two devices: {owner} on {device}, {name} on "
                f"{tensor.device}. Move the whole stage with .to(device)."
            )
    if device is None or device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(
            f"{owner} of stage {stage} is on {device}; stages run on the CPU and on CUDA devices. "
            + ("Give it memory with .to_empty(device=...), then load or initialise its weights."
               if device.type == "meta" else "Move the whole stage with .to(device).")
        )
    if not _C.build_info()["cuda"]:
        raise ValueError(
            f"stage {stage} is on {device}, but this build of rrfp has no CUDA: "
            f"{_C.build_info()['cuda_refusal']}. Install what is missing and build again with "
            "RRFP_CMAKE_ARGS=-DRRFP_CUDA=on, or call .cpu() on the stage."
        )
    return device


def place_on_gpus(layout, devices):
    """``{stage: device or None}`` with no None left; None where all stages are on the CPU.

    A stage without tensors is where the other stages of its rank are, else on the current GPU.

    Raises:
        ValueError: Some stages are on the CPU and some on GPUs, or a rank has two GPUs.
    """
    kinds = {}
    for stage, device in devices.items():
        if device is not None:
            kinds.setdefault(torch.device(device).type, stage)
    if len(kinds) == 2:
        raise ValueError(
            f"stage {kinds['cpu']} is on the CPU and stage {kinds['cuda']} on a GPU; a pipeline "
            "over both is not supported yet. Move all stages to GPUs, or all to the CPU."
        )
    if "cuda" not in kinds:
        return None
    placed = {}
    for rank in range(layout.num_ranks):
        stages = layout.stages_of(rank)
        known = {stage: torch.device(devices[stage]) for stage in stages if devices[stage]}
        first = next(iter(known), None)
        for stage, device in known.items():
            if device != known[first]:
                raise ValueError(
                    f"rank {rank} has stage {first} on {known[first]} and stage {stage} on "
                    f"{device}; a rank runs its stages on one GPU. Move them with .to(device), "
                    "or give each GPU a rank by placement."
                )
        if first is None:
            known[first] = torch.device("cuda", torch.cuda.current_device())
        placed.update(dict.fromkeys(stages, known[first]))
    return placed


def devices_by_rank(layout, devices):
    """The GPU of each rank, of what ``place_on_gpus`` gave."""
    return [devices[layout.stages_of(rank)[0]] for rank in range(layout.num_ranks)]


def refuse_shared_draws(modules, rank_of_stage, devices):
    """Refuse dropout in stages whose device another rank of this process uses too.

    They share its default generator too, whose seed a task sets: another rank's task would come
    between, and a checkpointed stage would recompute with another mask.

    Raises:
        ValueError: Names the stage.
    """
    ranks_on = {}
    for stage, rank in enumerate(rank_of_stage):
        ranks_on.setdefault(devices[stage], set()).add(rank)
    for stage, module in modules.items():
        if len(ranks_on[devices[stage]]) == 1:
            continue
        for part in module.modules():
            if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.training and part.p:
                raise ValueError(
                    f"stage {stage} drops out at random and shares {devices[stage]} with another "
                    "rank of this process, and with it torch's generator; use one process per "
                    "rank, or one device each."
                )


class Launcher:
    """Launches the tasks of one rank on one stream of its GPU, in one step.

    Attributes:
        shared_parcels: How values reach ranks of this process, which all share the GPU; else None.

    Raises:
        ValueError: ``free_sms`` are all that the GPU has.
    """

    def __init__(self, stream, lookahead, shared_parcels=None, free_sms=0):
        self.stream = stream
        self._free_sms = free_sms
        if free_sms:
            refuse_too_many(free_sms, stream.device)
        self.shared_parcels = shared_parcels
        self._lookahead = _LOOKAHEAD[lookahead]
        self._caller = torch.cuda.current_stream(stream.device)
        self._entered = contextlib.ExitStack()

    def fork(self):
        """Let the stream begin where the caller's stream is now."""
        if self.stream != self._caller:
            self.stream.wait_stream(self._caller)

    def join(self):
        """Let the caller's stream go on when the stream has done all that was launched."""
        if self.stream != self._caller:
            self._caller.wait_stream(self.stream)
        if self.shared_parcels is not None:
            self.shared_parcels.clear()

    def __enter__(self):
        # A backward pass then runs in this thread: to hand it to torch's own thread of the device
        # and to be woken afterwards takes longer than to launch several kernels.
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._entered.enter_context(torch.cuda.stream(self.stream))
        if self._free_sms:
            self._entered.enter_context(left_free(self._free_sms))
        return self

    def __exit__(self, *error):
        self._entered.close()

    def begin(self, runtime):
        """The runtime's coming step is launched here."""
        runtime.bind_stream(self.stream.cuda_stream, self._lookahead)

    def refuse_other_stream(self, stage):
        """Before outputs are sent, which are computed when this stream has come to their point.

        Raises:
            ValueError: The stage has left another stream of the device current.
        """
        if _current_raw_stream(self.stream.device_index) != self.stream.cuda_stream:
            raise ValueError(
                f"stage {stage} left another stream of {self.stream.device} current; what it "
                "computes must end on the stream that it was called on. Use `with "
                "torch.cuda.stream(...)`, and let the stream it was called on wait for the other."
            )

    def launched(self, runtime, task, timeout_ms):
        """A task (stage, kind, microbatch) has been launched; block until the next may be chosen.

        Raises:
            StatusError: The step has ended, here or elsewhere.
        """
        if runtime.wait_launched(timeout_ms):
            return
        stage, kind, microbatch = task
        runtime.abort(
            _C.StatusCode.STALLED, runtime.rank,
            f"rank {runtime.rank} launched {stage}{kind}{microbatch}, and for "
            f"{timeout_ms / 1000:g} s its GPU has not come to the end of the tasks before it. A "
            "kernel of a stage hangs, or waits in a collective for a rank that does not come.",
        )


class LocalStreams:
    """The streams of ranks that are threads of this process, kept from step to step.

    A rank alone on its device uses the caller's current stream there; ranks that share a device
    have one each, which begin after the caller's and are waited for by it. Where all ranks share
    one device, so do their values; with two, some would lie in memory that is given back when its
    receiver's stream is past it, and a third rank might still read it.
    """

    def __init__(self, devices):
        self._devices = devices  # by rank
        shared = {d for d in devices if devices.count(d) > 1}
        self._own = [torch.cuda.Stream(d) if d in shared else None for d in devices]
        self._shared_parcels = SharedParcels() if len(set(devices)) == 1 else None

    def launchers(self, lookahead):
        """One launcher per rank, for a step that begins now."""
        return [
            Launcher(own or torch.cuda.current_stream(device), lookahead, self._shared_parcels)
            for own, device in zip(self._own, self._devices, strict=True)
        ]


def make_local_device_runtimes(devices, run):
    """Runtimes of ranks in this process, by rank.

    Raises:
        DeviceError: A device is missing, out of memory, or cannot reach another one.
    """
    for device in set(devices):
        torch.cuda.current_stream(device)  # torch starts the device first, its way
    try:
        return _C.make_device_runtimes(
            [device.index for device in devices], run, int(1000 * SETTINGS.peer_timeout_s),
            int(1000 * SETTINGS.peer_timeout_s),
        )
    except _C.StatusError as error:
        raise error_from_status(error.code, error.origin_rank, error.message) from None


def end_side_by_side(runtimes, timeout_ms):
    """End runtimes of one process; each waits a while for the others to let go of its memory."""
    threads = [threading.Thread(target=r.end, args=(timeout_ms,)) for r in runtimes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def join_devices(rendezvous, control, run, edges, device, transport, agreement):
    """The runtime of this rank: its control connections and the best way between the devices.

    ``edges`` are (source rank, target rank); ``agreement`` is the memory of this rank's agreement
    group, or None. With ``transport`` "auto" all ranks use IPC, or all NCCL where one cannot.

    Raises:
        DeviceError: There is no way; the same on every rank, with every rank's reasons.
        RankTimeoutError: A rank has given the set-up up, or did not come in time.
    """
    member = rendezvous.member
    torch.cuda.current_stream(device)  # torch starts the device first, its way
    refusals = []
    for name in ("ipc", "nccl") if transport == "auto" else (transport,):
        link, refusal = None, None
        try:
            if name == "ipc":
                link = _C.ipc_link(
                    member.rank, member.num_ranks, device.index, _follows_streams()
                )
            else:
                link = _C.nccl_link(member.rank, edges, device.index)
        except (_C.StatusError, ValueError) as error:
            refusal = str(error)
        cards = rendezvous.exchange({"link": link and link.address, "refusal": refusal})
        refusal = _first_refusal(cards)
        if refusal is None:
            refusal = link.open([card["link"] for card in cards], rendezvous.time_left_ms(),
                                rendezvous.watch_for_leavers())
            refusal = _first_refusal(rendezvous.exchange({"refusal": refusal}))
        if refusal is None:
            return _C.join_device(
                control, link, run, SETTINGS.heartbeat_ms, int(1000 * SETTINGS.peer_timeout_s),
                agreement,
            )
        refusals.append(f"{name}: {refusal}")
        if transport == "auto" and name == "ipc" and member.rank == 0:
            logger.warning("GPUs are joined through NCCL, because %s", refusal)
    raise DeviceError(
        f"no way between the GPUs of this pipeline (transport {transport!r}). "
        f"{'; '.join(refusals)}."
    )


def _follows_streams():
    """Whether streams wait for messages, so that a task may be launched before its input is there.

    With one hardware queue a stream that waits holds up every other stream of the process.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        logger.info("CUDA_DEVICE_MAX_CONNECTIONS is 1: no stream waits for a message")
        return False
    return SETTINGS.stream_waits


def _first_refusal(cards):
    return next((card["refusal"] for card in cards if card["refusal"]), None)

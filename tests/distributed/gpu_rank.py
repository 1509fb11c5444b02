"""One rank of a pipeline on GPUs, for torchrun: random steps, each compared with a plain loop.

    torchrun --nproc-per-node 2 tests/distributed/gpu_rank.py --transport ipc --steps 20

With ``--beside-all-reduces`` each rank all-reduces on a stream of its own all the while. Prints
one JSON line per rank; any failure ends the process with an exception.
"""

import argparse
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from gpu_graph import run_part
from gpu_model import check_close, gradients_of, loss_fn, make_batch, make_stages, plain_loop
from graph_parity import check, draw_case

import rrfp

HINTS = {
    "loop": ["auto", "1f1b", "gpipe", "bf", "bfw", "zb-h1"],
    "v": ["auto", "zbv", "bfw", "bf"],
    "interleaved": ["auto", "interleaved", "bfw", "bf"],
}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--busy-cycles", type=int, default=200_000)
    parser.add_argument("--longest", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--check-every", type=int, default=1)
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--placement", default="loop")
    parser.add_argument("--graphs", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--add-in-products", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--check-memory", action="store_true", help="nobody else uses the GPUs")
    parser.add_argument("--beside-all-reduces", action="store_true")
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-at", choices=["set-up", "step", "leave"], default="step")
    # An edge of NCCL took half a minute where dozens of processes opened GPUs at once.
    parser.add_argument("--timeout-s", type=float, default=120.0)
    return parser.parse_args()


def all_reduce_until(stop, device, counts):
    """All-reduces whose contents are checked, until every rank says stop."""
    stream = torch.cuda.Stream(device)
    group = counts["group"]
    with torch.cuda.stream(stream):
        while True:
            value = torch.full((1 << 16,), 1.0, device=device)
            value[0] = float(stop.is_set())
            dist.all_reduce(value, group=group)
            first, second = value[:2].tolist()
            assert second == dist.get_world_size(), "an all-reduce gave a wrong sum"
            counts["all_reduces"] += 1
            time.sleep(0.0005)  # or this thread would hold the worker's interpreter half the time
            if first == dist.get_world_size():
                return


def ranks_of_stages(options, num_ranks):
    num_stages = options.stages_per_rank * num_ranks
    if options.placement == "loop":
        return [stage % num_ranks for stage in range(num_stages)]
    there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
    return [there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages)]


def run_steps(options, rank, num_ranks, device, dtype):
    owners = ranks_of_stages(options, num_ranks)
    devices = [device] * len(owners)
    stages = make_stages(options.seed, devices, dtype, options.busy_cycles, options.dropout)
    reference = make_stages(options.seed, devices, dtype, dropout=options.dropout)
    mine = {stage: stages[stage] for stage, owner in enumerate(owners) if owner == rank}
    is_chunked = options.placement == "loop" and options.stages_per_rank > 1
    hints = HINTS["interleaved" if is_chunked else options.placement]
    free_bytes = None
    for step in range(options.steps):
        inputs, targets = make_batch(
            options.seed * 7919 + step, options.microbatches, device, dtype, options.longest
        )
        for stage in mine.values():
            stage.zero_grad()
        result = rrfp.run_pipeline(
            mine,
            inputs if 0 in mine else None,
            targets if len(owners) - 1 in mine else None,
            loss_fn,
            hint=hints[step % len(hints)],
            slack=0 if step % 8 == 5 else "auto",
            deterministic=options.deterministic,
            split_backward=True if options.add_in_products else None,
            add_in_products=options.add_in_products,
            seed=options.seed,
            placement=options.placement,
            transport=options.transport,
            stall_timeout_s=options.timeout_s,
        )
        if step == 2 and rank == options.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % options.check_every == 0:
            around = functools.partial(rrfp.task_rng, options.seed, step)
            losses, gradients = plain_loop(reference, inputs, targets, around=around)
            for index, stage in mine.items():
                check_close(gradients_of(stage), gradients[index],
                            None if options.deterministic else dtype)
            if result.losses is not None:
                torch.testing.assert_close(
                    torch.stack(result.losses).float().cpu(), torch.tensor(losses),
                    rtol=1e-4 if dtype is torch.float32 else 3e-2, atol=1e-5,
                )
        if step == options.steps // 2:
            free_bytes = torch.cuda.mem_get_info(device)[0]
    grown_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
    assert not options.check_memory or grown_bytes < 96 << 20, grown_bytes
    return grown_bytes


def run_graphs(options, rank, num_ranks, device):
    """Random graphs, one after another; rank 0 compares what all ranks found."""
    for seed in range(options.seed, options.seed + options.graphs):
        case = draw_case(seed, num_ranks)
        here = {s: device for s, owner in enumerate(case.rank_of_stage) if owner == rank}
        found = run_part(case, here, lists_all=False, transport=options.transport)
        answers = [None] * num_ranks
        dist.all_gather_object(answers, found)
        try:
            check(case, answers)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {case}: {error}") from error


def end_at_set_up(how):
    """Let this process kill itself, or raise as Ctrl-C does (``how`` "leave"), when the devices'
    addresses are known, and not yet opened."""
    import rrfp.device

    def end(cards):
        if how == "leave":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL)

    rrfp.device._first_refusal = end


def main():
    options = parse()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = str(rank)  # NCCL takes ranks on one device for several hosts
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    beside = options.beside_all_reduces
    dist.init_process_group("cpu:gloo,cuda:nccl" if beside else "gloo")
    stop, counts, thread = threading.Event(), {"all_reduces": 0, "group": None}, None
    if beside:
        thread = threading.Thread(target=all_reduce_until, args=(stop, device, counts))
        thread.start()
    began = time.monotonic()
    says = {"rank": rank}
    if options.kill_at != "step" and options.kill_rank == rank:
        end_at_set_up(options.kill_at)
    try:
        if options.graphs:
            run_graphs(options, rank, num_ranks, device)
        else:
            says["grown_bytes"] = run_steps(options, rank, num_ranks, device,
                                            getattr(torch, options.dtype))
    except rrfp.RrfpError as error:
        if options.kill_rank < 0:
            raise
        torch.ones(1 << 20, device=device).sum().item()  # the GPU still works
        says.update(error=type(error).__name__, lost=getattr(error, "rank", None),
                    text=str(error), seconds=round(time.monotonic() - began, 1))
        print(json.dumps(says), flush=True)
        os._exit(0)  # without a word to the process group, whose store may be gone
    if thread is not None:
        stop.set()
        thread.join()
        says["all_reduces"] = counts["all_reduces"]
    says.update(steps=options.steps, seconds=round(time.monotonic() - began, 1), done=True)
    print(json.dumps(says), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of a pipeline on GPUs, for torchrun: random steps, each compared with a plain loop.

    torchrun --nproc-per-node 2 tests/distributed/gpu_rank.py --transport ipc --steps 20

With ``--beside-all-reduces`` each rank all-reduces on a stream of its own all the while. Prints
one JSON line per rank; any failure ends the process with an exception.
"""

import argparse
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
from gpu_model import check_close, gradients_of, loss_fn, make_batch, make_stages, plain_loop

import rrfp


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
    parser.add_argument("--beside-all-reduces", action="store_true")
    parser.add_argument("--kill-rank", type=int, default=-1)
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
            if first == dist.get_world_size():
                return


def run_steps(options, rank, num_ranks, device, dtype):
    stages = make_stages(options.seed, [device] * num_ranks, dtype, options.busy_cycles)
    reference = make_stages(options.seed, [device] * num_ranks, dtype)
    mine = stages[rank]
    hints = ["auto", "1f1b", "gpipe", "bf"]
    free_bytes = None
    for step in range(options.steps):
        inputs, targets = make_batch(
            options.seed * 7919 + step, options.microbatches, device, dtype, options.longest
        )
        mine.zero_grad()
        result = rrfp.run_pipeline(
            {rank: mine},
            inputs if rank == 0 else None,
            targets if rank == num_ranks - 1 else None,
            loss_fn,
            hint=hints[step % len(hints)],
            slack=0 if step % 8 == 5 else "auto",
            transport=options.transport,
            stall_timeout_s=60,
        )
        if step == 2 and rank == options.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % options.check_every == 0:
            losses, gradients = plain_loop(reference, inputs, targets)
            check_close(gradients_of(mine), gradients[rank], dtype)
            if rank == num_ranks - 1:
                torch.testing.assert_close(
                    torch.stack(result.losses).float().cpu(), torch.tensor(losses),
                    rtol=1e-4 if dtype is torch.float32 else 3e-2, atol=1e-5,
                )
        if step == options.steps // 2:
            free_bytes = torch.cuda.mem_get_info(device)[0]
    grown_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
    assert num_ranks > torch.cuda.device_count() or grown_bytes < 96 << 20, grown_bytes
    return grown_bytes


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
    try:
        says["grown_bytes"] = run_steps(options, rank, num_ranks, device,
                                        getattr(torch, options.dtype))
    except rrfp.PeerLostError as error:
        if options.kill_rank < 0:
            raise
        assert error.rank == options.kill_rank, error
        torch.ones(1 << 20, device=device).sum().item()  # the GPU still works
        print(json.dumps({"rank": rank, "lost": error.rank}), flush=True)
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

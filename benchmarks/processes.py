"""Runs one function on several processes joined by torch.distributed."""

import multiprocessing
import queue
import socket
import time


def serve(target, rank, num_ranks, port, arguments, answers):
    """Main function of a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    answers.put((rank, target(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(target, num_ranks, *arguments, timeout_s):
    """``target(rank, *arguments)`` on every rank; what each returned, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=serve, args=(target, rank, num_ranks, port, arguments, answers))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        collected = collect(answers, ranks, time.monotonic() + timeout_s)
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    return [collected[rank] for rank in range(num_ranks)]


def collect(answers, ranks, deadline):
    collected = {}
    while len(collected) < len(ranks):
        try:
            rank, value = answers.get(timeout=1.0)
            collected[rank] = value
        except queue.Empty:
            failed = [r for r, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if failed or time.monotonic() > deadline:
                why = f"ranks {failed} ended early" if failed else "time ran out"
                raise SystemExit(f"no result: {why}") from None
    return collected

"""A rank of test_two_hosts.py: trains some steps and compares with a plain loop; or trains on
until the line is cut, and says what it was told.

    host_rank.py [TRANSPORT ["until cut" | "large messages" | "slow producer"]]
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import rrfp

SHAPES = [(17, 6), (3, 6), (257, 6), (64, 6), (1, 6), (9, 6)]
NUM_STEPS = 8
LARGE = [(3000, 6)] * 6  # 144 kB a message: longer under way than computed, where packets get lost


class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x


def main():
    torch.set_num_threads(1)
    transport = sys.argv[1] if len(sys.argv) > 1 else "auto"
    mode = sys.argv[2] if len(sys.argv) > 2 else ""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    stages = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double()
              for _ in range(num_ranks)]
    if mode == "slow producer":
        stages[0].append(Slow())
    data = [torch.randn(shape, dtype=torch.float64)
            for shape in (LARGE if mode == "large messages" else SHAPES)]

    def step():
        stages[rank].zero_grad()
        return rrfp.run_pipeline(
            stages[rank],
            data if rank == 0 else None,
            data if rank == num_ranks - 1 else None,
            torch.nn.functional.mse_loss,
            transport=transport,
            broadcast_loss=True,
            stall_timeout_s=60,
        )

    if mode == "until cut":
        return train_until_cut(step, rank)
    results = [step() for _ in range(NUM_STEPS)]
    result = results[-1]
    mine = [parameter.grad for parameter in stages[rank].parameters()]
    if mode == "slow producer":
        del stages[0][-1]
    losses, gradients = plain_loop(stages, data, rank)
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    for mine_of_one, gradient in zip(mine, gradients):
        torch.testing.assert_close(mine_of_one, gradient)
    print(json.dumps([said_of(rank, result.report) for result in results]), flush=True)
    dist.destroy_process_group()


def said_of(rank, report):
    own = report.ranks[0]
    assert abs(own.compute_s + own.idle_s + own.host_s - own.wall_s) < 1e-6, own
    return {"rank": rank, "wall_s": own.wall_s, "input_s": own.idle_warmup_s + own.idle_input_s,
            "transfer_s": own.idle_transfer_s, "from": own.transfer_from_s, "text": str(report)}


def train_until_cut(step, rank):
    step()
    print("training", flush=True)
    last_s = time.monotonic()
    try:
        while True:
            step()
            last_s = time.monotonic()
    except rrfp.RrfpError as error:
        print(json.dumps({"rank": rank, "error": type(error).__name__, "text": str(error),
                          "after_s": time.monotonic() - last_s}), flush=True)
        os._exit(0)  # gloo's own connections are of no use any more


def plain_loop(stages, data, rank):
    """(losses, gradients of the rank's stage) by the book, on fresh gradients."""
    for stage in stages:
        stage.zero_grad()  # to None: the pipeline's own gradients are kept by the caller
    losses = []
    model = torch.nn.Sequential(*stages)
    for x in data:
        loss = torch.nn.functional.mse_loss(model(x), x)
        (loss / len(data)).backward()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in stages[rank].parameters()]


if __name__ == "__main__":
    main()

"""A training step on two GPUs beside torch's Schedule1F1B and the compute-bound ideal.

    torchrun --nproc-per-node 2 benchmarks/gpu/first_step.py [OUTPUT.json]

16 transformer blocks of width 2,048 (16 heads, GELU, bf16) in two stages, 2,048 tokens, 16
microbatches, MSE. The ideal is the slower stage alone, forward and backward of all microbatches,
times 17/16 (one microbatch to fill and drain). Runs alternate in rounds; each row is printed as
soon as it is known.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import rrfp

WIDTH, HEADS, TOKENS, BLOCKS, MICROBATCHES = 2048, 16, 2048, 16, 16
ROUNDS, STEPS, WARM_UP_STEPS = 3, 5, 3
TINY_MICROBATCHES, TINY_WIDTH = 64, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_before, self.norm_between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm_before(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.mlp(self.norm_between(x))


def step_ms(step, device):
    """The longest of all ranks, of one step that all begin together."""
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    took = torch.tensor(1000 * (time.perf_counter() - began), device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def host_cost(rank, device, tell):
    """Time per task of a stage that the GPU does in no time, over launching it directly."""
    stage = nn.Linear(TINY_WIDTH, TINY_WIDTH, device=device)
    inputs = [torch.ones(1, TINY_WIDTH, device=device) for _ in range(TINY_MICROBATCHES)]
    own = {
        "microbatches": inputs if rank == 0 else None,
        "targets": inputs if rank == 1 else None,
        "loss_fn": nn.functional.mse_loss,
    }

    def directly():
        for x in inputs:
            stage(x.detach().requires_grad_()).backward(x)

    def piped():
        rrfp.run_pipeline({rank: stage}, **own, hint="1f1b", slack=0)

    num_tasks = 2 * TINY_MICROBATCHES
    rows = {}
    for name, step in (("directly", directly), ("rrfp", piped)):
        times = [step_ms(step, device) for _ in range(12)][4:]
        rows[name] = 1000 * statistics.median(times) / num_tasks
    tell({"what": "host", "us_a_task": {n: round(t, 1) for n, t in rows.items()},
          "added_us": round(rows["rrfp"] - rows["directly"], 1)})


def main():
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    file = open(sys.argv[1], "a") if rank == 0 and len(sys.argv) > 1 else None

    def tell(row):
        if rank == 0:
            print(json.dumps(row), flush=True)
            if file is not None:
                print(json.dumps(row), file=file, flush=True)

    tell({"what": "set-up", "card": torch.cuda.get_device_name(device), "torch": torch.__version__,
          "rrfp": rrfp.build_info(), "max_connections":
          os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")})
    torch.manual_seed(rank)
    stage = nn.Sequential(*[Block() for _ in range(BLOCKS // 2)]).to(device, torch.bfloat16)
    batch = torch.randn(MICROBATCHES, TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    target = torch.randn_like(batch)
    inputs, targets = batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES)
    own = {
        "microbatches": inputs if rank == 0 else None,
        "targets": targets if rank == 1 else None,
        "loss_fn": nn.functional.mse_loss,
    }
    torch_stage = PipelineStage(stage, rank, 2, device)
    schedule = Schedule1F1B(torch_stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def alone():
        for x in inputs:
            stage(x.detach().requires_grad_()).backward(x)

    def torch_1f1b():
        schedule.step(batch) if rank == 0 else schedule.step(target=target)

    def piped(**options):
        return lambda: rrfp.run_pipeline({rank: stage}, **own, **options)

    runs = {
        "stage alone": alone,
        "torch 1F1B": torch_1f1b,
        "rrfp 1f1b slack=0": piped(hint="1f1b", slack=0),
        "rrfp auto": piped(),
        "rrfp 1f1b slack=0, nccl": piped(hint="1f1b", slack=0, transport="nccl"),
    }
    times, peaks = {name: [] for name in runs}, {}
    for _ in range(ROUNDS):
        for name, step in runs.items():
            stage.zero_grad()
            torch.cuda.empty_cache()
            for _ in range(WARM_UP_STEPS):
                step_ms(step, device)
            torch.cuda.reset_peak_memory_stats()
            times[name] += [step_ms(step, device) for _ in range(STEPS)]
            peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            tell({"what": "round", "run": name, "ms": [round(t, 2) for t in times[name][-STEPS:]]})
    ideal = statistics.median(times["stage alone"]) * (MICROBATCHES + 1) / MICROBATCHES
    for name in runs:
        ms = statistics.median(times[name])
        tell({"what": "step", "run": name, "median_ms": round(ms, 2),
              "over_ideal": round(ms / ideal, 4), "peak_gib_rank0": peaks[name]})
    tell({"what": "ideal", "ms": round(ideal, 2)})
    host_cost(rank, device, tell)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

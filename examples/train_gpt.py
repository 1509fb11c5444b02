"""Train a small byte-level GPT by readiness on text that every machine has: Python's own sources.

    python examples/train_gpt.py --ranks 4                    one process, a worker thread a rank
    torchrun --nproc-per-node 4 examples/train_gpt.py         one process a rank

On a machine with GPUs rank r trains on GPU r mod their number, else on the CPU.

A microbatch is one document, uncut up to --max-length bytes, so microbatches differ in length and
nothing is padded. The loss is the mean over all tokens of the step. The run ends by repeating its
first steps in a plain loop in one process, from the same weights on the same documents, and fails
if a loss or a gradient differs by more than rounding.
"""

import argparse
import os
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from gpt import Documents, loss_per_token, make_optimizer, make_stage
from tqdm import tqdm

import rrfp

MAX_NORM = 1.0  # of all gradients together
TOLERANCE = 1e-4  # relative; float32 sums in another order differ by about 1e-6


def in_flight(text):
    """A value of --max-in-flight: an int as one, everything else as rrfp reads it."""
    return int(text) if text.isdecimal() else text


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks, one stage each "
                        "(under torchrun: its number of processes)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=512, help="bytes of a document")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=8, help="transformer blocks in all")
    parser.add_argument("--hint", default="auto")
    parser.add_argument("--microbatch-order", default="mid")
    parser.add_argument("--max-in-flight", type=in_flight, help="microbatches between forward and "
                        "backward on a rank, or a size such as 2GiB (default: the number of ranks)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--check-steps", type=int, default=2, help="steps repeated in a plain loop")
    return parser.parse_args()


def device_of(rank, choice):
    """Where a rank trains: a GPU where there are some and this build of rrfp can use them."""
    can_use = torch.cuda.is_available() and rrfp.build_info()["cuda"]
    if choice == "cpu" or (choice == "auto" and not can_use):
        return torch.device("cpu")
    return torch.device("cuda", rank % max(1, torch.cuda.device_count()))


def step_loss(result, weights):
    """The token-weighted loss that was minimised; every rank has the losses here."""
    return sum(weight * float(loss) for weight, loss in zip(weights, result.losses, strict=True))


def gradients(stages):
    return {(index, name): parameter.grad.cpu().clone()
            for index, stage in stages.items() for name, parameter in stage.named_parameters()}


def train(args, stages, rank, documents):
    """Run the steps; returns each step's loss and the gradients of the first ones."""
    optimizer = make_optimizer(stages)
    first, last = 0 in stages, args.ranks - 1 in stages
    losses, kept = [], []
    tokens, began = 0, time.perf_counter()
    bar = tqdm(range(args.steps), disable=rank != 0, unit="step", file=sys.stdout, ncols=90)
    for step in bar:
        inputs, targets, costs = documents.batch(step)
        inputs = [value.to(device_of(0, args.device)) for value in inputs] if first else None
        last_device = device_of(args.ranks - 1, args.device)
        targets = [value.to(last_device) for value in targets] if last else None
        weights = [cost / sum(costs) for cost in costs]
        optimizer.zero_grad()
        result = rrfp.run_pipeline(
            list(stages.values()) if args.embedded else stages,
            inputs,
            targets=targets,
            loss_fn=loss_per_token,
            hint=args.hint,
            microbatch_order=args.microbatch_order,
            max_in_flight=args.max_in_flight,
            costs=costs,
            loss_reduction=weights,
            broadcast_loss=True,
        )
        if step < args.check_steps:
            kept.append(gradients(stages))
        # The norm over all ranks; one that each rank clips by its own would be another model's.
        rrfp.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
        optimizer.step()
        losses.append(step_loss(result, weights))
        tokens += sum(costs)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, "
                            f"{tokens / (time.perf_counter() - began):.0f} tokens/s")
    return losses, kept, result.report


def plain_loop(args, documents):
    """The same first steps without rrfp: one process, one microbatch after another."""
    device = device_of(0, args.device)
    stages = {index: make_stage(index, args).to(device) for index in range(args.ranks)}
    optimizer = make_optimizer(stages)
    losses, kept = [], []
    for step in range(args.check_steps):
        inputs, targets, costs = documents.batch(step)
        optimizer.zero_grad()
        total = 0.0
        for tokens, target, cost in zip(inputs, targets, costs, strict=True):
            value = tokens.to(device)
            for index in range(args.ranks):
                value = stages[index](value)
            loss = loss_per_token(value, target.to(device)) * (cost / sum(costs))
            loss.backward()
            total += loss.item()
        kept.append(gradients(stages))
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
        optimizer.step()
        losses.append(total)
    return losses, kept


def largest_differences(losses, grads, plain_losses, plain_grads):
    """Relative: of the losses, and of the gradients parameter by parameter (norms)."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, plain_losses, strict=False))
    grad = 0.0
    for ours, plain in zip(grads, plain_grads, strict=True):
        if ours.keys() != plain.keys():
            raise SystemExit("the pipeline and the plain loop have different parameters")
        for key, reference in plain.items():
            difference = (ours[key] - reference).norm() / reference.norm().clamp_min(1e-12)
            grad = max(grad, difference.item())
    return loss, grad


def gather_on_first(args, rank, value):
    """One value from each process, on rank 0; None elsewhere."""
    if args.embedded:
        return [value]
    values = [None] * args.ranks if rank == 0 else None
    dist.gather_object(value, values)
    return values


def main():
    args = parse_arguments()
    args.embedded = "RANK" not in os.environ
    # All ranks share this machine's cores: one intra-op thread each, unless there are plenty.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    rank = 0
    if not args.embedded:
        dist.init_process_group("gloo")
        rank, args.ranks = dist.get_rank(), dist.get_world_size()
    documents = Documents(args.microbatches, args.max_length)
    if rank == 0:
        print(documents.describe())
        print(f"rank 0 trains on {device_of(0, args.device)}")
    owned = range(args.ranks) if args.embedded else [rank]
    stages = {index: make_stage(index, args).to(device_of(index, args.device)) for index in owned}

    losses, kept, report = train(args, stages, rank, documents)

    kept = gather_on_first(args, rank, kept)
    reports = gather_on_first(args, rank, report)
    exit_code = 0
    if rank == 0:
        print("the last step, rank by rank:")
        print(replace(report, ranks=sum((each.ranks for each in reports), ())))
        print("(what the columns are: docs/concepts.md, What a step returns)")
        if "guard" in report.hint:
            print("(the guard found that order faster here: docs/concepts.md, Waiting)")
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
        merged = [{key: grad for part in parts for key, grad in part.items()}
                  for parts in zip(*kept, strict=True)]
        loss, grad = largest_differences(losses, merged, *plain_loop(args, documents))
        print(f"against a plain loop over the first {args.check_steps} steps: largest relative "
              f"difference in loss {loss:.1e}, in gradient {grad:.1e}")
        if not (loss <= TOLERANCE and grad <= TOLERANCE):
            print(f"that is more than {TOLERANCE:.0e}: the pipeline computed something else")
            exit_code = 1
    if not args.embedded:
        dist.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

"""Train a small vision + text model, whose two encoders join, on digits that are partly pictures.

    python examples/vision_text.py                             one process, a thread a rank
    torchrun --nproc-per-node 3 examples/vision_text.py        one process a rank

How many pictures a microbatch has varies, and every fourth has none; its text goes ahead while
others' pictures are still encoded. The run ends by repeating its first steps in a plain loop, and
fails if a loss or a gradient differs by more than rounding.
"""

import argparse
import os

import torch
import torch.distributed as dist
from pictures_and_text import (
    EDGES,
    LOSS,
    PICTURES,
    RANK_OF_STAGE,
    TOKENS,
    Rows,
    make_stage,
    run_plainly,
)
from torch.nn.functional import cross_entropy

import rrfp

TOLERANCE = 1e-4  # relative; float32 sums in another order differ by about 1e-6
CHECKED_STEPS = 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="rows of a microbatch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hint", default="auto")
    return parser.parse_args()


def make_optimizer(stages):
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    return torch.optim.AdamW(parameters, lr=2e-3)


def gradients(stages):
    return {f"{name} of stage {index}": parameter.grad.clone()
            for index, stage in stages.items()
            for name, parameter in stage.named_parameters()}


def one_step(args, stages, rows, step, **options):
    """A step, or a forward-only one, with all the tables that this process's stages need."""
    pictures, tokens, answers, costs = rows.batch(step)
    given = {PICTURES: pictures, TOKENS: tokens}
    inputs = {stage: given[stage] for stage in given if stage in stages} or None
    return rrfp.run_pipeline(
        list(stages.values()) if args.embedded else stages,
        inputs,
        targets=answers if LOSS in stages else None,
        loss_fn=lambda scores, answer: (
            cross_entropy(scores, answer), (scores.argmax(dim=1) == answer).float().mean()),
        edges=EDGES,
        placement=RANK_OF_STAGE,
        hint=args.hint,
        microbatch_order="mid",
        costs=costs,
        broadcast_loss=True,
        **options,
    )


def train(args, stages, rows, rank):
    """Returns the losses and gradients of the first steps."""
    optimizer = make_optimizer(stages)
    kept = []
    for step in range(args.steps):
        optimizer.zero_grad()
        result = one_step(args, stages, rows, step)
        loss = sum(map(float, result.losses)) / args.microbatches
        if step < CHECKED_STEPS:
            kept.append((loss, gradients(stages)))
        optimizer.step()
        if rank == 0 and (step % 25 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {loss:.3f}")
    return kept


def train_plainly(args, rows):
    stages = {index: make_stage(index, args.width) for index in range(len(RANK_OF_STAGE))}
    optimizer = make_optimizer(stages)
    kept = []
    for step in range(CHECKED_STEPS):
        optimizer.zero_grad()
        pictures, tokens, answers, _ = rows.batch(step)
        total = 0.0
        for picture, token, answer in zip(pictures, tokens, answers, strict=True):
            loss = cross_entropy(run_plainly(stages, picture, token), answer) / args.microbatches
            loss.backward()
            total += loss.item()
        kept.append((total, gradients(stages)))
        optimizer.step()
    return kept


def differences(ours, plain):
    """The largest relative differences of a loss and of a gradient."""
    loss = max(abs(a - b) / abs(b) for (a, _), (b, _) in zip(ours, plain, strict=True))
    grad = max(
        ((found[key] - reference).norm() / reference.norm().clamp_min(1e-12)).item()
        for (_, found), (_, references) in zip(ours, plain, strict=True)
        for key, reference in references.items()
    )
    return loss, grad


def main():
    args = parse_arguments()
    args.embedded = "RANK" not in os.environ
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 3))
    rank = 0
    if not args.embedded:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    stages = {index: make_stage(index, args.width) for index, owner in enumerate(RANK_OF_STAGE)
              if args.embedded or owner == rank}
    rows = Rows(args.microbatches, args.rows)
    counts = [0 if p is None else len(p) for p in rows.batch(0)[0]]
    if rank == 0:
        print(f"pictures per microbatch in the first step: {counts}")

    kept = train(args, stages, rows, rank)
    result = one_step(args, stages, Rows(args.microbatches, args.rows, from_test=True), 0,
                      forward_only=True)

    parts = [(kept, result.metrics)]
    if not args.embedded:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (kept, result.metrics))
        dist.destroy_process_group()
    if rank != 0:
        return
    right = next(metrics for _, metrics in parts if metrics is not None)
    print(f"unseen pictures: {100 * sum(map(float, right)) / len(right):.0f} % right")
    print(result.report)
    ours = [(steps[0][0], {k: g for _, found in steps for k, g in found.items()})
            for steps in zip(*(part for part, _ in parts), strict=True)]
    loss, grad = differences(ours, train_plainly(args, rows))
    print(f"against a plain loop: largest relative difference in loss {loss:.1e}, "
          f"in gradient {grad:.1e}")
    if not max(loss, grad) <= TOLERANCE:
        raise SystemExit("the pipeline computed something else than the plain loop")


if __name__ == "__main__":
    main()

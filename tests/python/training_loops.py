"""Random training loops: what a user changes between steps, beside the same loop in plain torch.

A loop is a list of events drawn from a seed, the same in every process. Nothing here imports rrfp
but ``run_loop``; the reference is ``plain_loop_of``.
"""

import random

import parity_model as model
import torch
from torch import nn

NUM_RANKS, WIDTH = 3, 6
NUM_STEPS = 7


class Stage(nn.Module):
    """Behaves differently in train and eval mode, counts its forwards in a buffer."""

    def __init__(self, seed, index, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(97 * seed + index)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=dtype))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, value):
        if self.training:
            self.seen += 1
        return torch.tanh(self.mix(value)) * (1.5 if self.training else 1.0) + self.bias


def events_of(seed):
    """Per step a dict of what happens before it and how it runs."""
    rng = random.Random(seed)
    events = []
    for step in range(NUM_STEPS):
        num_microbatches = rng.choice([1, 2, 3, 5, 8])
        events.append({
            "lengths": [rng.randint(1, 5) for _ in range(num_microbatches)],
            "dtype": rng.choice([None, None, torch.float32, torch.float64]),
            "frozen": rng.choice([None, "mix.weight", "bias", ""]),  # "": nothing any more
            "frozen_stage": rng.randrange(NUM_RANKS),
            "evaluates": rng.random() < 0.4,
            "accumulates": step < NUM_STEPS - 1 and rng.random() < 0.4,
            "weighted": rng.random() < 0.5,
            "clips": rng.random() < 0.5,
            "scale": rng.choice([None, 16.0]),
            "options": {
                "hint": rng.choice(["auto", "1f1b", "gpipe", "bfw"]),
                "deterministic": rng.random() < 0.3,
                "max_in_flight": rng.choice([None, 1, 4, "2KiB"]),
            },
        })
    return events


def batch_of(seed, step, lengths, dtype):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    draw = [torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
            for length in lengths for _ in range(2)]
    return [x.to(dtype) for x in draw[0::2]], [x.to(dtype) for x in draw[1::2]]


class Loop:
    """Stages, optimizer and schedule of a loop; ``owned`` names the stages of this process."""

    def __init__(self, seed, owned):
        self.seed, self.owned = seed, owned
        self.stages = {s: Stage(seed, s, torch.float64) for s in owned}
        self.dtype = torch.float64
        parameters = [p for stage in self.stages.values() for p in stage.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NUM_STEPS)
        self.losses = []

    def run(self, train, evaluate, clip):
        """``train(event, inputs, targets, weights)`` and ``evaluate(inputs, targets)`` return the
        losses; ``clip(parameters)`` limits the norm of all stages' gradients."""
        for step, event in enumerate(events_of(self.seed)):
            self._change(event)
            inputs, targets = batch_of(self.seed, step, event["lengths"], self.dtype)
            total = sum(event["lengths"])
            weights = [length / total for length in event["lengths"]]
            self.losses.append(train(event, inputs, targets, weights))
            if event["evaluates"]:
                for stage in self.stages.values():
                    stage.eval()
                self.losses.append(evaluate(inputs, targets))
                for stage in self.stages.values():
                    stage.train()
            if not event["accumulates"]:
                parameters = [p for s in self.stages.values() for p in s.parameters()]
                for parameter in parameters:
                    if parameter.grad is not None and event["scale"]:
                        parameter.grad /= event["scale"]
                if event["clips"]:
                    clip(parameters)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()

    def _change(self, event):
        if event["dtype"] is not None:
            self.dtype = event["dtype"]
            for stage in self.stages.values():
                stage.to(self.dtype)
        stage = self.stages.get(event["frozen_stage"])
        if stage is not None and event["frozen"] is not None:
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_(name != event["frozen"])

    def state(self):
        return {f"{s}.{name}": value.clone() for s, stage in self.stages.items()
                for name, value in stage.state_dict().items()}


def factors(event, weights):
    scale = event["scale"] or 1.0
    if event["weighted"]:
        return [weight * scale for weight in weights]
    return [scale / len(weights)] * len(weights)


def plain_loop_of(seed):
    """(losses, state) of the loop without a pipeline."""
    loop = Loop(seed, range(NUM_RANKS))
    stages = list(loop.stages.values())

    def train(event, inputs, targets, weights):
        return model.plain_loop(stages, inputs, targets, nn.functional.mse_loss,
                                factors(event, weights))

    @torch.no_grad()
    def evaluate(inputs, targets):
        return [nn.functional.mse_loss(nn.Sequential(*stages)(x), y)
                for x, y in zip(inputs, targets, strict=True)]

    loop.run(train, evaluate, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5))
    return [[x.item() for x in losses] for losses in loop.losses], loop.state()


def run_loop(rank, num_ranks, mode, seed):
    """The same of this process's stages, in a pipeline; every process has the losses."""
    import rrfp

    owned = range(NUM_RANKS) if mode == "threads" else [rank]
    loop = Loop(seed, owned)
    has_source, has_loss = 0 in owned, NUM_RANKS - 1 in owned
    stages = list(loop.stages.values()) if mode == "threads" else loop.stages
    with rrfp.Pipeline(stages) as pipeline:

        def call(step, inputs, targets, **options):
            result = step(inputs if has_source else None, targets if has_loss else None,
                          nn.functional.mse_loss, broadcast_loss=True, stall_timeout_s=30.0,
                          **options)
            return result.losses

        def train(event, inputs, targets, weights):
            return call(pipeline.step, inputs, targets, grad_scale=event["scale"],
                        loss_reduction=weights if event["weighted"] else "mean",
                        **event["options"])

        loop.run(train, lambda inputs, targets: call(pipeline.eval_step, inputs, targets),
                 lambda parameters: rrfp.clip_grad_norm_(parameters, 0.5))
    return [[x.item() for x in losses] for losses in loop.losses], {
        name: value.numpy() for name, value in loop.state().items()}

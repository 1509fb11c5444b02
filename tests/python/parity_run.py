"""Runs one parity case with rrfp inside a worker process, and judges what came back."""

import contextlib
import functools

import parity_cases
import parity_late
import parity_model as model
import torch

import rrfp

BOUND = {"float64": 1e-10, "float32": 1e-5}


def factors_of(case):
    """What each microbatch's loss is multiplied with, and the argument that says so."""
    m = case.num_microbatches
    scale = case.grad_scale or 1.0
    if case.reduction == "weights":
        weights = [0.25 + (case.seed + 3 * i) % 7 for i in range(m)]
        return [w * scale for w in weights], weights
    return [scale / m if case.reduction == "mean" else scale] * m, case.reduction


def build_stages(case):
    dtype = getattr(torch, case.dtype)
    return [
        model.RecordingStage(
            case.seed,
            s,
            dtype,
            model.make_delays(case.seed, s, case.num_microbatches, case.delays),
        )
        for s in range(case.num_ranks)
    ]


def step_options(case, costs):
    options = {
        "hint": case.user_order if case.hint == "user" else case.hint,
        "slack": case.slack,
        "split_backward": case.split,
        "deterministic": case.deterministic,
        "max_in_flight": case.max_in_flight(),
        "activation_bytes": case.activation_bytes(costs),
        "loss_reduction": factors_of(case)[1],
        "grad_scale": case.grad_scale,
        "microbatch_order": case.microbatch_order(costs) if case.order == "list" else case.order,
        "costs": costs,
        "stall_timeout_s": 30.0,
    }
    if case.order == "callable":
        options["microbatch_order"] = parity_cases.longest_first
    return options


def run_rank(rank, num_ranks, case):
    """What a worker process does: its stages, all steps, and everything worth comparing."""
    everything = build_stages(case)
    own = everything if case.mode == "threads" else {rank: everything[rank]}
    owned = range(case.num_ranks) if case.mode == "threads" else [rank]
    has_source, has_loss = 0 in owned, case.num_ranks - 1 in owned
    losses, orders, made = [], [], []
    with contextlib.ExitStack() as stack:
        if case.late_messages:
            made = stack.enter_context(parity_late.late_runtimes(case.seed))
        if case.surface == "Pipeline":
            pipeline = stack.enter_context(rrfp.Pipeline(own))
            step = functools.partial(pipeline.step)
        else:
            step = functools.partial(rrfp.run_pipeline, own)
        for index in range(case.steps):
            inputs, targets, costs = model.make_batch(
                case.seed, index, case.num_microbatches, getattr(torch, case.dtype)
            )
            result = step(
                inputs if has_source else None,
                targets if has_loss else None,
                model.squared_error,
                **step_options(case, costs),
            )
            losses.append(None if result.losses is None else [x.item() for x in result.losses])
            orders.append({s: everything[s].log[:] for s in owned})
            for s in owned:
                everything[s].log.clear()
    gradients = {
        f"{s}.{name}": None if p.grad is None else p.grad.numpy()
        for s in owned
        for name, p in everything[s].named_parameters()
    }
    calls = {s: everything[s].calls for s in owned}
    return {
        "losses": losses,
        "orders": orders,
        "gradients": gradients,
        "calls": calls,
        "late": sum(runtime.delayed for runtime in made),
        "reordered": sum(runtime.reordered for runtime in made),
    }


def reference(case):
    """Gradients by name and losses by step of the plain loop."""
    stages = build_stages(case)
    for stage in stages:
        stage.delays = {}
    losses = []
    for index in range(case.steps):
        inputs, targets, _ = model.make_batch(
            case.seed, index, case.num_microbatches, getattr(torch, case.dtype)
        )
        raw = model.plain_loop(stages, inputs, targets, model.squared_error, factors_of(case)[0])
        losses.append([x.item() for x in raw])
    gradients = {
        f"{s}.{n}": p.grad for s, stage in enumerate(stages) for n, p in stage.named_parameters()
    }
    return gradients, losses


def check(case, answers):
    """Everything the suite promises of one case; AssertionError names the first breach."""
    merged = {"gradients": {}, "calls": {}}
    for answer in answers:
        merged["gradients"].update(answer["gradients"])
        merged["calls"].update(answer["calls"])
    gradients, losses = reference(case)
    bound = BOUND[case.dtype]
    assert merged["gradients"].keys() == gradients.keys()
    for name, expected in gradients.items():
        error = model.gradient_error(merged["gradients"][name], expected)
        assert error <= bound, f"gradient of {name} is off by {error:.3g}, allowed {bound}"
    last = answers[-1]
    for step in range(case.steps):
        got = torch.tensor(last["losses"][step], dtype=torch.float64)
        want = torch.tensor(losses[step], dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=bound, atol=bound, msg=lambda m: f"losses: {m}")
    for answer in answers[:-1]:
        assert answer["losses"] == [None] * case.steps, "only the loss rank knows the losses"
    expected_calls = dict.fromkeys(range(case.num_ranks), case.steps * case.num_microbatches)
    assert merged["calls"] == expected_calls
    check_orders(case, answers)


def check_orders(case, answers):
    for step in range(case.steps):
        orders = {s: texts for answer in answers for s, texts in answer["orders"][step].items()}
        costs = model.make_batch(case.seed, step, case.num_microbatches, torch.float64)[2]
        for stage, texts in orders.items():
            assert len(texts) == len(set(texts)) == 2 * case.num_microbatches
            if case.slack == 0 and case.fixed_texts(stage, costs) is not None:
                assert texts == case.fixed_texts(stage, costs), f"order of stage {stage}"
            check_limit(case, stage, texts, costs)


def check_limit(case, stage, texts, costs):
    limit = case.max_in_flight()
    if isinstance(limit, list):
        limit = limit[stage]
    if limit == "1f1b+2":
        limit = case.num_ranks - stage + 2
    if isinstance(limit, str):
        sizes = case.activation_bytes(costs)
        if sizes is not None:
            held = model.peak_units(texts, sizes[stage])
            assert held <= 900, f"stage {stage} held {held} bytes"
        return
    if limit is None and case.slack != 0:
        limit = case.num_ranks
    if limit is not None:
        assert model.peak_units(texts) <= limit, f"stage {stage} held more than {limit} units"

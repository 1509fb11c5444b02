"""Clipping and loss scaling over all ranks, against torch's own on the whole model.

Would catch: a norm of one rank alone, a tensor counted twice, a rank that steps while another
skips.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from free_port import free_port

import rrfp

RANK = textwrap.dedent("""
    import copy, json, sys, torch, torch.distributed as dist
    import rrfp
    rank, port = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plain, mine = copy.deepcopy(model), model[rank]
    data = [torch.randn(3, 4) for _ in range(4)]

    def step(scale=None):
        mine.zero_grad()
        rrfp.run_pipeline(mine, data if rank == 0 else None, data if rank == 1 else None,
                          torch.nn.functional.mse_loss, grad_scale=scale, stall_timeout_s=60)

    for kind in (2.0, 1.0, float("inf")):
        step()
        plain.zero_grad()
        sum(torch.nn.functional.mse_loss(plain(x), x) / 4 for x in data).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, kind)
        parameters = [*mine.parameters(), *mine.parameters()]
        norm = rrfp.clip_grad_norm_(parameters, 0.05, kind)
        assert abs(norm.item() - expected.item()) < 1e-5, (kind, norm, expected)
        for p, q in zip(mine.parameters(), plain[rank].parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)

    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    scaler = rrfp.GradScaler(init_scale=8.0)
    before = copy.deepcopy(mine.state_dict())
    step(scaler.get_scale())
    if rank == 0:
        mine.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0, scaler.get_scale()
    assert all(torch.equal(before[k], v) for k, v in mine.state_dict().items()), "it stepped"
    step(scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    plain.zero_grad()
    sum(torch.nn.functional.mse_loss(plain(x), x) / 4 for x in data).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(mine.parameters(), plain[rank].parameters()):
        torch.testing.assert_close(p, q)
    mine.weight.grad.fill_(float("nan") if rank else 0.0)
    try:
        rrfp.clip_grad_norm_(mine.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
    dist.destroy_process_group()
""")


def test_two_processes(tmp_path):
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), port], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, errors) in zip(ranks, ends):
        assert rank.returncode == 0, errors
        assert "the norm of the gradients of all ranks is nan" in json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, float("inf")])
def test_one_process(kind):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    model(torch.randn(4, 3)).square().sum().backward()
    mine = [p.grad.clone() for p in model.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind)
    clipped = [p.grad.clone() for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), mine):
        parameter.grad = gradient
    norm = rrfp.clip_grad_norm_(model.parameters(), 0.1, kind)
    torch.testing.assert_close(norm.float(), expected)
    for parameter, gradient in zip(model.parameters(), clipped):
        torch.testing.assert_close(parameter.grad, gradient)


def test_no_gradients_and_wrong_arguments():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert rrfp.clip_grad_norm_(parameter, 1.0).item() == 0.0
    for wrong in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(ValueError, match="max_norm must be at least 0"):
            rrfp.clip_grad_norm_(parameter, **wrong)


def test_complex_gradients_count_with_both_parts():
    torch.manual_seed(4)
    mine = [torch.zeros(3, dtype=dtype, requires_grad=True)
            for dtype in (torch.complex64, torch.float64)]
    theirs = [p.detach().clone().requires_grad_() for p in mine]
    for p, q in zip(mine, theirs):
        p.grad = torch.randn(3, dtype=p.dtype)
        q.grad = p.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    assert abs(rrfp.clip_grad_norm_(mine, 0.5).item() - expected.item()) < 1e-5
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p.grad, q.grad)

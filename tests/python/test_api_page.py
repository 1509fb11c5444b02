"""docs/api.md: its names are those of the package, and each of its recipes does what it says.

Would catch: a public name or argument that the page lacks, a recipe that has gone stale.
"""

import copy
import pickle
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import rrfp

PAGE = Path(__file__).resolve().parents[2] / "docs/api.md"
LOSS = nn.functional.cross_entropy


def recipes():
    """{heading: Python block}."""
    return dict(re.findall(r"^### ([^\n]+)\n(?:(?!^###).)*?^```python\n(.*?)^```$",
                           PAGE.read_text(), re.MULTILINE | re.DOTALL))


def names_of(stages):
    """What a recipe finds."""
    inputs = [torch.randn(2, 8) for _ in range(4)]
    targets = [torch.randint(0, 4, (2,)) for _ in range(4)]
    parameters = [p for stage in stages for p in stage.parameters()]
    return {"torch": torch, "nn": nn, "rrfp": rrfp, "stages": stages, "inputs": inputs,
            "targets": targets, "loss_fn": LOSS, "parameters": parameters,
            "optimizer": torch.optim.SGD(parameters, lr=0.1)}


def plain_losses(stages, names, dtype=None):
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        return [LOSS(stages[1](stages[0](x)), y)
                for x, y in zip(names["inputs"], names["targets"], strict=True)]


def gradients(stages):
    return [p.grad for stage in stages for p in stage.parameters()]


def check_evaluate(names, plain):
    losses = plain_losses(plain, names)
    torch.testing.assert_close(names["mean"], sum(losses).detach() / 4)
    assert all(gradient is None for gradient in gradients(names["stages"]))
    assert all(stage.training for stage in names["stages"])


def check_metrics(names, plain):
    expected = sum((plain[1](plain[0](x)).argmax(dim=1) == y).sum()
                   for x, y in zip(names["inputs"], names["targets"], strict=True))
    assert names["right"] == expected
    assert all(gradient is not None for gradient in gradients(names["stages"]))


def check_tokens(names, plain):
    losses = plain_losses(plain, names)
    mean = sum(w * loss for w, loss in zip(names["weights"], losses, strict=True))
    torch.testing.assert_close(names["mean"], mean.detach())
    mean.backward()
    torch.testing.assert_close(gradients(names["stages"]), gradients(plain))


def check_keywords(names, plain):
    assert len(names["result"].losses) == 4  # forward() has no default for the mask


def check_loader(names, plain):
    losses = torch.stack(plain_losses(plain, names)).detach()
    torch.testing.assert_close(torch.stack(names["result"].losses), losses)
    assert next(names["input_loader"], None) is None, "items were left, or drawn twice"


def check_autocast(names, plain):
    losses = torch.stack(plain_losses(plain, names, torch.bfloat16)).detach()
    torch.testing.assert_close(torch.stack(names["result"].losses), losses)
    assert not torch.equal(losses, torch.stack(plain_losses(plain, names)).detach())


def check_scaler(names, plain):
    before = [p.detach().clone() for stage in plain for p in stage.parameters()]
    sum(plain_losses(plain, names)).div(4).backward()
    nn.utils.clip_grad_norm_([p for stage in plain for p in stage.parameters()], 1.0)
    torch.testing.assert_close(gradients(names["stages"]), gradients(plain), rtol=0.05, atol=0.01)
    assert not any(map(torch.equal, before, names["parameters"])), "the step was skipped"


def check_clipping(names, plain):
    sum(plain_losses(plain, names)).div(4).backward()
    apart = [nn.utils.clip_grad_norm_(stage.parameters(), 1e9) for stage in plain]
    whole = nn.utils.clip_grad_norm_([p for stage in plain for p in stage.parameters()], 1.0)
    torch.testing.assert_close(names["norm"].float(), whole)
    assert max(apart) < 0.99 * whole, "the norm of one rank is not that of the model"
    torch.testing.assert_close(gradients(names["stages"]), gradients(plain))


def check_simulated(names, plain):
    tasks = {(kind, stage, m) for kind in "FB" for stage in range(2) for m in range(4)}
    durations, fixed, wider = names["durations"], names["fixed"], names["wider"]
    assert set(durations) == tasks and min(durations.values()) > 0
    assert pickle.loads(pickle.dumps(names["records"])) == names["records"]
    for simulated in (fixed, wider):
        for rank in range(2):
            own = sum(seconds for task, seconds in durations.items() if task[1] == rank)
            assert own == pytest.approx(simulated.busy_s(rank), abs=1e-7)
    assert fixed.order(0) == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert wider.limit_units == (4, 4)
    assert names["gain"] > 0


CHECKS = {
    "Evaluate": check_evaluate,
    "Metrics beside the loss": check_metrics,
    "A mean over tokens": check_tokens,
    "Keyword arguments for a stage": check_keywords,
    "Microbatches from a DataLoader": check_loader,
    "Autocast": check_autocast,
    "Float16 with a GradScaler": check_scaler,
    "Clipping": check_clipping,
    "What another setting would be worth": check_simulated,
}


def test_every_recipe_is_checked():
    assert list(recipes()) == list(CHECKS)
    assert PAGE.read_text().count("```python") == len(CHECKS)


@pytest.mark.parametrize("heading", CHECKS)
def test_recipe(heading):
    torch.manual_seed(7)
    stages = [nn.Linear(8, 8), nn.Linear(8, 4)]
    plain = copy.deepcopy(stages)
    names = names_of(stages)
    exec(compile(recipes()[heading], f"docs/api.md, {heading}", "exec"), names)
    CHECKS[heading](names, plain)


def test_names_are_those_of_the_package():
    script = runpy.run_path(str(PAGE.with_suffix(".py")))
    text = PAGE.read_text()
    assert script["page"](text) == text, "run: python docs/api.py"

"""The random graphs of graph_parity.py with their stages on GPUs, at random speeds."""

import torch
from graph_parity import Node, batch, loss_fn

BUSY_CYCLES = 200_000


class GpuNode(Node):
    """A node that keeps its device busy for a random time before and after its work."""

    def busy(self):
        torch.cuda._sleep(self.delays.randrange(BUSY_CYCLES))

    def forward(self, *inputs):
        self.busy()
        output = super().forward(*inputs)
        self.busy()
        return output


def run_part(case, device_of_stage, lists_all, **options):
    """({stage: (calls, {parameter: gradient})}, losses by stage) of the stages here, on the CPU.

    Args:
        device_of_stage: ``{stage: device}`` of the stages that live in this process.
        lists_all: Whether these are all stages, given to rrfp as a list.
    """
    import rrfp

    stages = {index: GpuNode(case, index).to(d) for index, d in device_of_stage.items()}
    inputs, targets = batch(case)
    sources = {index: d for index, d in device_of_stage.items() if not case.sources_of(index)}
    ends = {stage: targets[stage] for stage in case.loss_stages if stage in stages}
    result = rrfp.run_pipeline(
        list(stages.values()) if lists_all else stages,
        {index: [value.to(d) for value in inputs] for index, d in sources.items()} or None,
        {s: [value.to(device_of_stage[s]) for value in table] for s, table in ends.items()} or None,
        loss_fn,
        **{**case.options(), "stall_timeout_s": 120.0, **options},  # NCCL: see gpu_rank.py
    )
    losses = result.losses
    if losses is not None and not isinstance(losses, dict):
        losses = {case.loss_stages[0]: losses}
    found = {
        index: (stage.calls, {name: on_cpu(p.grad) for name, p in stage.named_parameters()})
        for index, stage in stages.items()
    }
    return found, {s: [on_cpu(loss) for loss in table] for s, table in (losses or {}).items()}


def on_cpu(tensor):
    return None if tensor is None else tensor.cpu()

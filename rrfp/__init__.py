"""rrfp: pipeline-parallel training in which the schedule only ranks what is ready.

``run_pipeline`` runs one training step; ``Pipeline`` is the same as an object. ``simulate``
runs the same decisions on a virtual clock.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("rrfp._C") is None:  # else the first module that needs it blames a circular import
    raise ImportError(
        f"rrfp in {__path__[0]} is not built: no extension rrfp._C for this Python lies there. If "
        "these are the sources and rrfp is installed beside them, start Python in another folder "
        "(here it finds the sources first); or build them: make build, then .venv/bin/python."
    )

from rrfp.auxiliary_loss import aux_loss
from rrfp.build_info import build_info
from rrfp.errors import (
    ClosedError,
    DeviceError,
    InterruptedStepError,
    PeerLostError,
    ProtocolError,
    RankTimeoutError,
    RrfpError,
    StageError,
    StallError,
    TaskError,
)
from rrfp.gradients import GradScaler, clip_grad_norm_
from rrfp.pipeline import Pipeline, run_pipeline
from rrfp.rank_hint import HintState
from rrfp.report import RankReport, StepReport, StepResult
from rrfp.scheduler import Scheduler, ScheduledTask
from rrfp.simulation import SimulatedStep, simulate
from rrfp.task_rng import task_rng
from rrfp.tasks import Task, TaskKind, parse_task

__all__ = [
    "ClosedError",
    "DeviceError",
    "GradScaler",
    "HintState",
    "InterruptedStepError",
    "PeerLostError",
    "Pipeline",
    "ProtocolError",
    "RankReport",
    "RankTimeoutError",
    "RrfpError",
    "ScheduledTask",
    "Scheduler",
    "SimulatedStep",
    "StageError",
    "StallError",
    "StepReport",
    "StepResult",
    "Task",
    "TaskError",
    "TaskKind",
    "aux_loss",
    "build_info",
    "clip_grad_norm_",
    "parse_task",
    "run_pipeline",
    "simulate",
    "task_rng",
]

__version__ = build_info()["version"]


def __dir__():
    return sorted([*__all__, "__version__"])

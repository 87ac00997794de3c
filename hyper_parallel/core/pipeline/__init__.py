"""Pipeline parallelism: layers over ranks, micro-batches through them, by the schedules of torch.

    tied -> api -> stage -> boundary
            api -> arguments, split -> schedules

`split` (which layers and stages a rank has) and `schedules` (names and rules) are numbers only. `api` is the pipeline
of a rank, `arguments` checks what it is given. `boundary` finds out what goes between stages and passes it, `stage` is
what torch's schedules run. `tied` sees to a weight that the first and the last stage share, and to the norm over
stages.
"""

from hyper_parallel.core.pipeline.api import Pipeline
from hyper_parallel.core.pipeline.schedules import SCHEDULES, ScheduleKind, find_schedule
from hyper_parallel.core.pipeline.split import StageSlice, rank_of_stage, split_layers, stage_slices, stages_of_rank
from hyper_parallel.core.pipeline.tied import TiedWeights, clip_grad_norm

__all__ = [
    "SCHEDULES",
    "Pipeline",
    "ScheduleKind",
    "StageSlice",
    "TiedWeights",
    "clip_grad_norm",
    "find_schedule",
    "rank_of_stage",
    "split_layers",
    "stage_slices",
    "stages_of_rank",
]

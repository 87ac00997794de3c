"""However the ranks are arranged, a run is the run of one device: losses, gradients' norms, weights, optimizer state.

And a run that is saved goes on under any other arrangement; under the same one bit for bit.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partialmethod
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import sim
from hyper_parallel.core.fully_shard.api import HSDPModule
from hyper_parallel.core.pipeline import SCHEDULES
from hyper_parallel.trainer.config import ParallelConfig
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.ranks import Ranks
from hyper_parallel.trainer.saving import Saver
from hyper_parallel.trainer.trainer import train
from tests.property.training_kit import (
    PROBLEMS,
    STEPS,
    Arrangement,
    Problem,
    arrangements,
    folder,
    reference,
    run,
    saved,
    step_folder,
)

pytestmark = pytest.mark.sim

"""The path under which `train`, and what makes its data, are known; they are defined in `loop.py` and `data.py`."""

from hyper_parallel.trainer.data import RecordLoader
from hyper_parallel.trainer.loop import Trainer, train

__all__ = ["RecordLoader", "Trainer", "train"]

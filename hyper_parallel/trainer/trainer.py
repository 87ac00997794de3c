"""The path under which `train` is known; it is defined in `loop.py`."""

from hyper_parallel.trainer.loop import Trainer, train

__all__ = ["Trainer", "train"]

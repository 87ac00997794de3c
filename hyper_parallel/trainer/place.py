"""The path under which a rank's place is known; it is defined in `loop.py`."""

from hyper_parallel.core.common.groups import init_process_group
from hyper_parallel.trainer.loop import RankPlace, process_group

__all__ = ["RankPlace", "init_process_group", "process_group"]

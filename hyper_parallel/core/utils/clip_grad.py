"""`clip_grad_norm_` under the path that users of the existing library know."""

from hyper_parallel.core.fully_shard import clip_grad_norm_

__all__ = ["clip_grad_norm_"]

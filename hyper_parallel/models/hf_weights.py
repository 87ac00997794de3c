"""Weights to and from folders that transformers loads: config.json and safetensors files. Nothing is unpickled.

Transformers is not imported, and no rank need hold the whole model.
"""

from hyper_parallel.models.hf_export import export_huggingface
from hyper_parallel.models.hf_import import import_huggingface, load_huggingface

__all__ = ["export_huggingface", "import_huggingface", "load_huggingface"]

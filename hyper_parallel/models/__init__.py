"""Small, readable reference models, and ready plans for them and for models of transformers.

huggingface, moe_plan -> plans -> lora -> hf_names
hf_weights -> hf_folder, hf_names -> moe -> llama
chat_template
"""

from hyper_parallel.models.hf_weights import export_huggingface, import_huggingface, load_huggingface
from hyper_parallel.models.huggingface import huggingface_plan, parallelize_huggingface
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import moe_plan, parallelize_moe
from hyper_parallel.models.plans import llama_loss, llama_plan

__all__ = [
    "Llama",
    "LlamaConfig",
    "MoEConfig",
    "MoELlama",
    "export_huggingface",
    "huggingface_plan",
    "import_huggingface",
    "llama_loss",
    "llama_plan",
    "load_huggingface",
    "moe_plan",
    "parallelize_huggingface",
    "parallelize_moe",
]

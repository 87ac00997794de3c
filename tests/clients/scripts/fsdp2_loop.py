"""A loop over `fully_shard` with another library's part in it: `fsdp2_loop.py ENGINE LIBRARY`.

ENGINE is `torch` or `hyper_parallel`: from where `fully_shard` is imported; or `none`, on one process. LIBRARY is what
else takes part.
"""

from __future__ import annotations

import sys

import tiny
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

engine, library = sys.argv[1:3]
if engine == "torch":
    from torch.distributed.fsdp import fully_shard
elif engine == "hyper_parallel":
    from hyper_parallel import fully_shard
else:

    def fully_shard(module: torch.nn.Module, **_: object) -> torch.nn.Module:
        return module


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = tiny.llama()
if library == "lora":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
elif library == "qlora":
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if rank == 0:
        model.save_pretrained("base")
    dist.barrier()
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained("base", quantization_config=four_bits, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
elif library.startswith("float8"):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)

layers = [each for each in model.modules() if type(each).__name__ == "LlamaDecoderLayer"]
mesh = init_device_mesh("cpu", (world,))
if library == "float8-tp":
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh = both["dp"]
    for layer in layers:
        split = {"gate_proj": Float8ColwiseParallel(), "up_proj": Float8ColwiseParallel()}
        parallelize_module(layer.mlp, both["tp"], {**split, "down_proj": Float8RowwiseParallel()})
if library.endswith("compile"):
    for layer in layers:
        layer.compile()
for layer in layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
if library == "float8-tp" and engine == "hyper_parallel":
    model.set_reduce_op_type("avg")  # as FSDP2 does; units with DTensors add up if nothing is said

model.train()  # from_pretrained calls eval(), in which bitsandbytes assigns weight.data in forward, on CPUs with bf16
trained = [each for each in model.parameters() if each.requires_grad]
if library == "int8":
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(trained, lr=1e-2)
else:
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
for step in range(tiny.STEPS):
    ids = tiny.mine(step, mesh.get_local_rank(), mesh.size())
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print("loss", total.item() / world)
if library in ("save_pretrained", "lora"):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained("saved", state_dict=state)
dist.destroy_process_group()

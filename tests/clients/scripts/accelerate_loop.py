"""accelerate's own loop, with DDP or FSDP2: `accelerate_loop.py ddp|fsdp2`."""

from __future__ import annotations

import sys

import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

plugin = None
if sys.argv[1] == "fsdp2":
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
loader = DataLoader(tiny.rows(), batch_size=tiny.ROWS // accelerator.num_processes)
model = tiny.llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", accelerator.reduce(loss.detach(), "mean").item())
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    "saved", state_dict=state, is_main_process=accelerator.is_main_process, save_function=accelerator.save
)
accelerator.end_training()

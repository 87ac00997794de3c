"""transformers' `Trainer`, which finds its ranks by itself: `trainer.py ddp|fsdp`."""

from __future__ import annotations

import os
import sys

import tiny
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    arguments = TrainingArguments(
        output_dir="saved",
        use_cpu=True,
        per_device_train_batch_size=tiny.ROWS // ranks,
        max_steps=tiny.STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=tiny.STEPS,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **(sharded if sys.argv[1] == "fsdp" else {}),
    )
    data = [{"input_ids": row, "labels": row} for row in tiny.rows()]
    trainer = Trainer(model=tiny.llama(), args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model("saved")
    dist.destroy_process_group()

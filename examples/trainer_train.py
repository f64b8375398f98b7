"""Hugging Face Trainer: make the group before TrainingArguments, and add one callback.

torchrun --nproc-per-node 2 examples/trainer_train.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import torch_cgx
from torch_cgx.transformers import CGXCallback

dist.init_process_group("cgx")  # on CPU, Accelerate would make a gloo group, and refuses other names
set_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, num_labels=2
)
model = BertForSequenceClassification(config)
words = torch.randint(1, 100, (512, 16))
data = [{"input_ids": row, "labels": int(row[0] > 50)} for row in words]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=16,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    callback = CGXCallback(trainer, bits=4, overrides={"*.embeddings.*": {"bits": 8}})
    trainer.add_callback(callback)
    trainer.train()

stats = torch_cgx.stats()
if trainer.is_world_process_zero():
    print(callback.cgx_state.report())
    print(stats)
assert stats["bytes_after"] < stats["bytes_before"] / 4, stats
dist.destroy_process_group()

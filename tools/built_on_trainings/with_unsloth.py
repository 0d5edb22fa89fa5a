"""Train with Unsloth, which replaces parts of TRL and transformers."""

from __future__ import annotations

from unsloth import FastLanguageModel  # isort: skip  # first, because it replaces parts of the others

import torch
from datasets import Dataset
from job import TRAINING, hosts, options
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    "../model", max_seq_length=64, load_in_4bit=False, dtype=torch.float32, full_finetuning=not options.adapter
)
if options.adapter:
    model = FastLanguageModel.get_peft_model(model, r=2, target_modules=["q_proj", "v_proj"], random_state=3)
arguments = SFTConfig(**TRAINING, dataset_text_field="text", max_length=64)
rows = Dataset.from_json("../texts.jsonl")
SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=arguments, callbacks=hosts()).train()

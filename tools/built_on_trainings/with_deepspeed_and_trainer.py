"""Train with DeepSpeed in the Hugging Face Trainer."""

from __future__ import annotations

from datasets import Dataset
from job import TRAINING, hosts, options
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

config = {
    "zero_optimization": {"stage": options.stage}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}  # fmt: skip
arguments = TrainingArguments(**TRAINING, use_cpu=True, deepspeed=config)
model, tokenizer = AutoModelForCausalLM.from_pretrained("../model"), AutoTokenizer.from_pretrained("../model")
rows = Dataset.from_json("../texts.jsonl").map(lambda row: tokenizer(row["text"]), remove_columns="text")
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=hosts()).train()

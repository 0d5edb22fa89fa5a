"""Train with DeepSpeed in the Hugging Face Trainer."""

from __future__ import annotations

from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from job import TRAINING, hosts, options
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

config = {
    "zero_optimization": {"stage": options.stage}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "fp16": {"enabled": options.fp16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}  # fmt: skip
model, tokenizer = AutoModelForCausalLM.from_pretrained("../model"), AutoTokenizer.from_pretrained("../model")
arguments = TrainingArguments(**TRAINING, deepspeed=config)  # without use_cpu, with which Accelerate does not use DeepSpeed
rows = Dataset.from_json("../texts.jsonl").map(lambda row: tokenizer(row["text"]), remove_columns="text")
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=hosts())
trainer.train()
if not isinstance(trainer.model_wrapped, DeepSpeedEngine):
    raise SystemExit("the Trainer has not used DeepSpeed")

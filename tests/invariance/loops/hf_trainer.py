"""A Hugging Face Trainer on a tiny random GPT-2, with accumulation, warm-up and evaluation.

steps: 3
sites: transformer.wte transformer.h.0.attn.c_attn lm_head transformer.h.0.mlp.c_fc.weight
kinds: output grad_output param grad update
scalars: loss lr
losses: not printed
needs: transformers accelerate
"""

import tempfile
import warnings

import torch
import witness
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
witness.start(51)
sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(17, (12, 8))
data = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, warmup_steps=1,
        seed=51, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", eval_strategy="steps",
        eval_steps=2, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
for entry in trainer.state.log_history:
    for name in ("loss", "grad_norm", "eval_loss"):
        if name in entry:
            witness.note(entry[name])
witness.finish(model, trainer.optimizer)

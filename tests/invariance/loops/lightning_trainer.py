"""A Lightning Trainer with validation, gradient clipping and accumulation.

steps: 4
sites: net.0 net.2 net.0.weight
kinds: output grad_output param grad update
scalars: loss lr
losses: not printed
needs: lightning
"""

import logging
import warnings

import lightning
import torch
import witness
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        witness.note(loss)
        return loss

    def validation_step(self, batch, index):
        witness.note(self.net(batch[0]).abs().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


witness.start(50)
task = Task()
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, accelerator="cpu", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(task, loader, DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2))
witness.finish(task, trainer.optimizers[0])

"""Two networks and two optimizers that take turns; the fake batch is detached for one of them.

steps: 8
sites: gen.0 gen.2 disc.0 disc.2 gen.0.weight disc.3.bias
kinds: output grad_output param grad update
scalars: loss lr
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(3)
gen = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
disc = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-2, betas=(0.5, 0.9))
opt_d = torch.optim.RMSprop(disc.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()
with witness.watching({"gen": gen, "disc": disc}, [opt_g, opt_d]):
    for _ in range(4):
        real, fake = torch.randn(8, 2) + 3, gen(torch.randn(8, 4))
        opt_d.zero_grad()
        loss_d = criterion(disc(real), torch.ones(8, 1)) + criterion(disc(fake.detach()), torch.zeros(8, 1))
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = criterion(disc(fake), torch.ones(8, 1))
        loss_g.backward()
        opt_g.step()
        witness.note(loss_d)
        witness.note(loss_g)
witness.finish(gen, disc, opt_g, opt_d)

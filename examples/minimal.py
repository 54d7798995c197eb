"""Save a model while it trains, and go on after whatever stopped it. Run it, interrupt it, run it again."""

import torch

from ckstore_torch import Checkpointer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())

with Checkpointer("minimal-store", model=model, optimizer=optimizer, save_every=50, keep=3) as checkpointer:
    start = checkpointer.resume()
    print("starting anew" if start == 0 else f"going on from step {start}")
    for n in range(start, start + 200):
        inputs = torch.randn(32, 16)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if checkpointer.step(n + 1, loss=loss.item()):
            print(f"step {n + 1:4}  loss {loss.item():.4f}  being saved")

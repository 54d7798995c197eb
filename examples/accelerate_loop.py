"""A training loop with Accelerate and a store. Run it, interrupt it, run it again; or with `accelerate launch`."""

from __future__ import annotations

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DataLoaderConfiguration, set_seed  # type: ignore[import-untyped]

from ckstore_torch.integrations.accelerate import CkstoreStates


def main(*, cpu: bool = False) -> None:
    set_seed(1)
    # The order of an epoch follows from its number, so that the rest of it can be found again.
    accelerator = Accelerator(cpu=cpu, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    samples = torch.utils.data.TensorDataset(torch.randn(512, 16))
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with CkstoreStates(accelerator, "accelerate-store") as states:
        done = states.load_state()
        accelerator.print(f"going on from step {done}" if done else "starting anew")
        while done < 100:
            epoch, skipped = divmod(done, len(loader))
            loader.set_epoch(epoch)
            for (batch,) in states.skip_first_batches(loader, skipped):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done % 20 == 0:
                    states.save_state(step=done, loss=loss.item())
                    accelerator.print(f"step {done:3}  loss {loss.item():.4f}  being saved")
                if done == 100:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main()

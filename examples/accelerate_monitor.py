"""A training loop on Hugging Face Accelerate, with three lines of Bireme in it (marked).

accelerate launch --cpu --num_processes 2 examples/accelerate_monitor.py
torchrun --nproc-per-node 2 examples/accelerate_monitor.py
bireme report runs/accelerate
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bireme


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(data), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    monitor = bireme.Monitor("runs/accelerate", model=model, optimizer=optimizer)  # 1
    micro_batches = iter(monitor.batches(loader))  # 2
    for first, second in zip(micro_batches, micro_batches, strict=False):
        with monitor.step(tokens=len(first[0]) + len(second[0])) as step:  # 3
            for (batch,) in (first, second):
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            step.loss(loss)
    monitor.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""accelerate: the Accelerator finds the ranks by itself."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator()
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(3):
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

    steps = len(loader)
    accelerator.print(f"accelerate: ok, {accelerator.num_processes} ranks, {steps} steps in each epoch")
    accelerator.end_training()


if __name__ == "__main__":
    main()

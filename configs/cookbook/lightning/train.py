"""Lightning: the Trainer finds the ranks by itself, but must be told how many there are."""

import os

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main() -> None:
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32))
    if trainer.is_global_zero:
        print(f"lightning: ok, {trainer.world_size} ranks, {trainer.global_step} steps")
    if dist.is_initialized():  # otherwise, gloo's threads may outlive the interpreter
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

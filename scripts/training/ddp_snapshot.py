"""DDP with a snapshot after every epoch. When it is run again or restarted, it continues from the last one.

Rank 0 writes the snapshot and every rank reads it, so all nodes must share the directory --dir. The number of
ranks may change at a restart. The sampler then redistributes the data.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    """The content of a snapshot: a model, its optimizer and the number of finished epochs."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.epoch = 0

    def save(self) -> None:
        """Write a new file, then rename it.

        If the process dies, either the old or the new snapshot remains.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }
        self.snapshot.parent.mkdir(parents=True, exist_ok=True)
        partial = self.snapshot.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.snapshot)

    def load(self) -> None:
        """Load everything from the snapshot, on every rank."""
        state = torch.load(self.snapshot, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def train_epoch(self, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
        """Train on this rank's part of the data, and return the mean loss over all ranks."""
        losses = []
        for x, label in loader:
            loss = cross_entropy(self.ddp(x), label)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        self.epoch += 1
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return float(mean / dist.get_world_size())

    def accuracy(self, data: TensorDataset) -> float:
        """Return the share of the data that the model labels correctly."""
        with torch.no_grad():
            hits = [(self.model(x).argmax(1) == label).sum() for x, label in DataLoader(data, batch_size=32)]
        return int(sum(hits)) / len(data)


def dataset() -> TensorDataset:
    """Return points in the plane, labeled by whether they are inside the unit circle."""
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 1).long())


def train(trainer: Trainer, data: TensorDataset, epochs: int) -> None:
    """Train until ``epochs`` epochs are done, including those of earlier runs."""
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    while trainer.epoch < epochs:
        sampler.set_epoch(trainer.epoch)  # a different order in every epoch, even after a restart
        loss = trainer.train_epoch(loader)
        if dist.get_rank() == 0:
            trainer.save()
            ranks = dist.get_world_size()
            print(f"epoch {trainer.epoch:>2}  loss {loss:.3f}  on {ranks} ranks", flush=True)


def main() -> None:
    """Resume from the snapshot if there is one, train, and check the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory of the snapshot")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    trainer, data = Trainer(args.dir / "snapshot.pt"), dataset()
    if trainer.snapshot.exists():
        trainer.load()
        print(f"rank {dist.get_rank()} resumed from epoch {trainer.epoch}", flush=True)
    train(trainer, data, args.epochs)

    accuracy = trainer.accuracy(data)
    if accuracy < 0.9:
        raise SystemExit(f"ddp_snapshot: rank {dist.get_rank()} has an accuracy of {accuracy:.3f}")
    if dist.get_rank() == 0:
        print(f"ddp_snapshot: ok, {trainer.epoch} epochs, accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""DDP with a snapshot after every epoch: run it again, or let it be restarted, and it goes on where it was.

Rank 0 writes the snapshot and every rank reads it, so --dir must be a folder that all nodes share. It may be
restarted with more or fewer ranks: the sampler deals the data anew, and the model goes on.
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
    """A model, its optimizer and the epochs done: what a snapshot holds."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.epoch = 0

    def save(self) -> None:
        """Write beside the snapshot, then rename: whoever dies here leaves the old one or the new one."""
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
        """Take everything back from the snapshot; every rank does this for itself."""
        state = torch.load(self.snapshot, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def train_epoch(self, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
        """One pass over this rank's part of the data; the mean loss over all ranks."""
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
        """The share of all the data that the model labels right."""
        with torch.no_grad():
            hits = [(self.model(x).argmax(1) == label).sum() for x, label in DataLoader(data, batch_size=32)]
        return int(sum(hits)) / len(data)


def dataset() -> TensorDataset:
    """Points of the plane, labeled by whether they lie in the unit circle."""
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 1).long())


def train(trainer: Trainer, data: TensorDataset, epochs: int) -> None:
    """Train until ``epochs`` epochs are done, those of earlier runs included."""
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    while trainer.epoch < epochs:
        sampler.set_epoch(trainer.epoch)  # another order in every epoch, resumed or not
        loss = trainer.train_epoch(loader)
        if dist.get_rank() == 0:
            trainer.save()
            ranks = dist.get_world_size()
            print(f"epoch {trainer.epoch:>2}  loss {loss:.3f}  on {ranks} ranks", flush=True)


def main() -> None:
    """Resume where there is a snapshot, train, and check what was learned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="folder of the snapshot")
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

"""Two ranks learn the Zen of Python by heart: a small character model, trained with DistributedDataParallel.

Every few steps, a line shows the loss and a sample of the model's output. It runs on the CPU with gloo, or
with nccl if every rank has its own GPU. DISTLAUNCH_BACKEND overrides this.
"""

from __future__ import annotations  # for ranks with Python 3.8

import argparse
import contextlib
import importlib
import io
import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

PROMPT = "Beautiful is"


class CharModel(nn.Module):
    """A model that predicts the next character from the previous ones."""

    def __init__(self, vocabulary: str, width: int = 96) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(len(vocabulary), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(vocabulary))

    def forward(self, codes: Tensor) -> Tensor:
        """Score every character at every position: (batch, time) → (batch, time, vocabulary)."""
        hidden, _ = self.gru(self.embed(codes))
        scores: Tensor = self.head(hidden)
        return scores

    def encode(self, text: str) -> Tensor:
        """Return the text as one code per character."""
        return torch.tensor([self.vocabulary.index(char) for char in text])

    def write(self, prompt: str, length: int, temperature: float = 0.5) -> str:
        """Return the prompt, continued by ``length`` characters from the model."""
        codes = self.encode(prompt).to(self.head.weight.device)
        with torch.no_grad():
            for _ in range(length):
                scores = self(codes[None])[0, -1]
                codes = torch.cat([codes, torch.multinomial(softmax(scores / temperature, dim=0), 1)])
        return "".join(self.vocabulary[code] for code in codes.tolist())


def zen() -> str:
    """Return the text that ``import this`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        importlib.import_module("this")
    return text.getvalue()


def join_process_group() -> torch.device:
    """Join the other ranks, and return this rank's device: its GPU with nccl, else the CPU."""
    gpu_each = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    backend = os.environ.get("DISTLAUNCH_BACKEND", "nccl" if gpu_each else "gloo")
    if backend != "nccl":
        dist.init_process_group(backend)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, device_id=device)
    return device


def train(
    model: DistributedDataParallel, codes: Tensor, steps: int, report_every: int, killed: int | None
) -> list[float]:
    """Train for ``steps`` steps, on random windows that differ per rank, and return this rank's losses.

    The rank ``killed`` kills itself halfway.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    generator = torch.Generator().manual_seed(dist.get_rank())
    windows = codes.unfold(0, 49, 1)
    losses = []
    for step in range(1, steps + 1):
        if step == steps // 2 and dist.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = windows[torch.randint(len(windows), (16,), generator=generator)]
        scores = model(batch[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # here, DDP averages the gradients over all ranks
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step == 1 or step % report_every == 0):
            print(f"step {step:>4}  loss {losses[-1]:.2f}  {model.module.write(PROMPT, 32)!r}", flush=True)
    return losses


def same_on_all_ranks(model: nn.Module) -> bool:
    """Return whether all ranks end with exactly the same weights."""
    bits = parameters_to_vector(model.parameters()).detach().view(torch.int32)
    mine = bits.sum(dtype=torch.int64)
    prints = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(prints, mine)
    return all(torch.equal(mine, theirs) for theirs in prints)


def main() -> None:
    """Train, compare the ranks, and show what the model has learned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--report-every", type=int, default=25)
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
    parser.add_argument(
        "--kill-rank", type=int, metavar="RANK", help="kill this rank halfway, to see what happens"
    )
    args = parser.parse_args()

    device = join_process_group()
    torch.manual_seed(0)
    text = zen()
    model = CharModel("".join(sorted(set(text)))).to(device)
    codes = model.encode(text).to(device)
    losses = train(DistributedDataParallel(model), codes, args.steps, args.report_every, args.kill_rank)

    if not same_on_all_ranks(model):
        raise SystemExit("quickstart: the ranks ended with different weights")
    if losses[-1] > losses[0] / 2:
        raise SystemExit(f"quickstart: the loss went from {losses[0]:.2f} only to {losses[-1]:.2f}")
    sample = model.write(PROMPT, args.sample)
    if dist.get_rank() == 0:
        print(f"\n{sample}\n")
        print(f"quickstart: ok, {dist.get_world_size()} ranks, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

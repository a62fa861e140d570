"""A DeepSpeed engine at ZeRO stage 0."""

import deepspeed
import torch
from torch import nn


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 0}},
    )
    for _ in range(10):
        x = torch.randn(16, 8)
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"deepspeed: ok, {engine.world_size} ranks, {engine.global_steps} steps")
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()

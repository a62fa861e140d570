# Rank 2 of 4, exit status 1: its own error, of another server, reads like that of a rank whose peer has gone.
# It says: feature server: Connection reset by peer

import torch
import torch.distributed as dist


def features(step: int) -> torch.Tensor:
    if dist.get_rank() == 2 and step == 3:
        raise RuntimeError("feature server: Connection reset by peer")
    return torch.randn(4, 8)


dist.init_process_group("gloo")
for step in range(10):
    mean = features(step).mean()
    dist.all_reduce(mean)
dist.destroy_process_group()

# Rank 2 of 3, exit status 1: a KeyError on the last rank, while the others are in a barrier.
# It says: KeyError: 'shard-2'

import torch
import torch.distributed as dist

SHARDS = {f"shard-{number}": torch.full((8,), float(number)) for number in range(2)}

dist.init_process_group("gloo")
dist.barrier()
shard = SHARDS[f"shard-{dist.get_rank()}"]
dist.barrier()
dist.all_reduce(shard)
dist.destroy_process_group()

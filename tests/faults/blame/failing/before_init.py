# Rank 0 of 2, exit status 1: it raises before init_process_group(), in which the others wait for its store.
# It says: /data/vocabulary.json: 0 tokens

import os

import torch
import torch.distributed as dist


def vocabulary() -> list[str]:
    tokens = [] if os.environ["RANK"] == "0" else ["the", "a"]
    if not tokens:
        raise RuntimeError("/data/vocabulary.json: 0 tokens")
    return tokens


tokens = vocabulary()
dist.init_process_group("gloo")
counts = torch.zeros(len(tokens))
for _ in range(10):
    dist.all_reduce(counts)
dist.destroy_process_group()

"""DDP under torch.profiler: steps 2 to 4 are recorded, and each rank writes its own trace."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    trace = parser.parse_args().trace
    trace.parent.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(64, 64))
    with profile(
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(6):
            model(torch.randn(32, 64)).square().mean().backward()
            profiler.step()

    dist.barrier()  # now the traces of all ranks are written
    if dist.get_rank() == 0:
        print(f"torch_profiler: ok, {len(list(trace.parent.glob('rank*.json')))} traces")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

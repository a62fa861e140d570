# Rank 1 of 2, exit status 5: a thread that watches something fails, and ends the process with os._exit(5).
# It says: the lease of the data set has expired

import os
import threading
import time
import traceback

import torch
import torch.distributed as dist


def watch_lease() -> None:
    try:
        time.sleep(0.2)
        raise TimeoutError("the lease of the data set has expired")
    except TimeoutError:
        traceback.print_exc()
        os._exit(5)  # sys.exit() would end this thread only


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    threading.Thread(target=watch_lease, daemon=True).start()
loss = torch.ones(1)
for _ in range(100):
    time.sleep(0.05)  # computes
    dist.all_reduce(loss)
dist.destroy_process_group()

"""`python -m distlaunch.torchrun`, in place of `python -m torch.distributed.run`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["torchrun"]
    runpy.run_module("distlaunch", run_name="__main__")

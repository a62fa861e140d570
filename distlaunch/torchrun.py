"""`python -m distlaunch.torchrun`, in place of `python -m torch.distributed.run`."""

import sys

from distlaunch.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["torchrun"]
    main()

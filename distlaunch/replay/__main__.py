"""`python -m distlaunch.replay`: see `distlaunch.replay.show`."""

import sys

from distlaunch.replay.show import main

if __name__ == "__main__":
    sys.exit(main())

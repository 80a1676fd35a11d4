"""`python -m hiremate_lightning.run` is `hiremate run`, for launchers of modules: torchrun, accelerate launch."""

import sys

from .command_line.run import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m hiremate_lightning` is the command `hiremate`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

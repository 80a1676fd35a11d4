"""All tests, and what they share. What they and the processes that they start import is compiled once, not in each."""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

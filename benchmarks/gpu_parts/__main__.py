"""Run one part."""

from .runner import main

main()

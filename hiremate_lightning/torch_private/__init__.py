"""Every private API of torch that the package uses, each in the module of what it is about, and nothing else.

Checked on the versions in `CHECKED_VERSIONS`; `test_torch_private.py` fails loudly when one of them moves.
"""

CHECKED_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

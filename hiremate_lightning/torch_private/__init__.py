"""Hold every private API of torch that the package uses, each in the module of its subject, and nothing else.

`CHECKED_VERSIONS` are the releases whose private names were read and on which tests passed: all tests on 2.13 and 2.15,
those that may differ on 2.14 (`make test-latest`), a part on 2.11 and 2.12. `test_torch_private.py` fails loudly when a
name moves. On any other release, hacks that save time or avoid graph breaks are off: see `hacks`.
"""

CHECKED_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

"""The networks of benchmarks and tests: random weights, batches and losses; the README says which is where.

Nothing is downloaded. Imports go one way: from the files of networks to `networks`, `cases` and `stand_in`.
"""

"""The networks that benchmarks train, and tests too: random weights, with batches and losses; nothing is downloaded.

`networks` are those written here; `models` takes about a second a step, `packages` well below that; `papers` are the
papers' networks at their own sizes; `architectures` makes every architecture of transformers and timm small;
`sizes_that_vary` gets other sizes at each step. `cases` holds what they share, `stand_in` what is to be missing.
"""

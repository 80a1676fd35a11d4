"""The life of a planned model: from captured code to plans that take over, step by step.

Begin with `session`, which others call. `steps` begins and ends each step, and `current_step` keeps what lasts for one.
`eager_steps` decides which steps run eager, `graph_programs` by which program each captured graph of other steps runs.
`planned` checks plans against measurements, and `plan_maker` makes them. The facts of each step signature are kept
in `signatures/`, which also decides what is measured and timed.
"""

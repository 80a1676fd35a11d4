"""The life of a planned model: from captured code to plans that take over, step by step.

Begin with `session`, which others call. `steps` begins and ends each step, and `current_step` keeps what lasts for one.
`eager_steps` decides which steps run eager, `graph_programs` by which program each captured graph of the others runs.
`planned` checks plans against what happens, and `plan_maker` makes them. What is known of each step signature is kept
in `signatures/`, which also decides what is measured and timed.
"""

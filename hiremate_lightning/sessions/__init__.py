"""The life of a planned model: from captured code to plans that take over, step by step.

Begin with `session`, which others call. `steps` begins and ends each step, and `current_step` keeps what lasts for one.
`graph_programs` chooses the program of each captured graph. `history` keeps one record for each step signature;
`planned` checks plans against what happens, and `plan_maker` makes them. `watching` decides what is measured and timed.
"""

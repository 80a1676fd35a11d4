"""The life of a planned model: from captured code to plans that take over, step by step."""

"""How wide tables are where there is no terminal that could say."""

PIPED_WIDTH = 110
"""Columns of a table in a pipe or a file."""

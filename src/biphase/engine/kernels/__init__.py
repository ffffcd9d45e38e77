"""The operators of both phases, chosen by shape."""

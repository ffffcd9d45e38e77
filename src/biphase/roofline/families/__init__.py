"""Readers of model configs, one file a kind of model: shapes out of the fields of a family."""

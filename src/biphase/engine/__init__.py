"""Runs a plan on a real model."""

"""biphase: the two phases of LLM inference, prefill and decode, measured, modelled and served.

Importing the package loads neither numpy nor torch; each room imports what it needs.
"""

__version__ = "0.1.0"

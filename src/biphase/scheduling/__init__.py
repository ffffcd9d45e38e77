"""Which tokens run in the next step: plain Python on ints, no torch, no clock, no I/O."""

"""What the hardware permits: pure arithmetic, numpy at most."""

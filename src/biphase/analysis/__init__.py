"""From records to numbers, laws and verdicts."""

"""`bapo verify-parallel`: parity check of two parallel layouts on a canary batch."""

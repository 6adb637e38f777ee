"""``bapo verify-parallel``: whether two parallel layouts compute the same on one batch of sequences."""

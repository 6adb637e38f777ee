"""The rehearsal: a rank of a recipe's layout at real shapes, without GPU, weights, arithmetic or peers."""

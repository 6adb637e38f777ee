"""Studies of BAPO: programs that compare methods, and the figures of docs/algorithm.md and docs/losses.md."""

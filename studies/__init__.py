"""Studies of BAPO: programs that compare methods or draw figures of docs/algorithm.md and docs/losses.md."""

"""Convert, reshard, inspect and compare checkpoints: bytes are moved from file to file, no model is built."""

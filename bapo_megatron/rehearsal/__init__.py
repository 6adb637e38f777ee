"""The rehearsal of a GPU run on a machine without a GPU."""

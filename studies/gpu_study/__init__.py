"""One GPU hour: stale data and five arms on a pretrained model of 0.5 B parameters."""

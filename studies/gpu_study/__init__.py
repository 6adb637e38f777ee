"""Study in one GPU hour: five arms on stale data, with a pretrained model of 0.5 B parameters."""

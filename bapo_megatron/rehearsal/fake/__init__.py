"""What stands between a rank and torch in a rehearsal: fake tensors, a fake GPU, fake peers, and a meter."""

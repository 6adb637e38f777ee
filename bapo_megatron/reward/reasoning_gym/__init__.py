"""reasoning-gym's tasks: their problems and their verifiers, as the reward `reasoning_gym`."""

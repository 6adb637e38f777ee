"""Public datasets made into the one format that runs and evaluations read."""

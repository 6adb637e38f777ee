"""Dataset preparation: public datasets to the one format that runs and evaluations read."""

"""Dataset preparation (``bapo data prepare``): public datasets to the one format of runs and evaluations."""

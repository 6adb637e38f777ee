"""Experiment trackers (W&B, trackio, MLflow), each in an observer process that tails the files of a run.

A tracker may hang, fail or be slow: the run writes its files, and waits for trackers only at its end.
``processes.py`` is the run's side, on rank 0; ``following.py`` the process; ``trackers.py`` has the protocol
of a tracker.
"""

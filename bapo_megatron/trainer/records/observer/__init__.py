"""Experiment trackers (W&B, trackio, MLflow), each in an observer process that tails the files of a run.

A tracker may hang, fail or be slow: the run only writes its files. ``processes.py`` is the run's side, on
rank 0; ``__main__.py`` the process; ``tracker.py`` the protocol of a tracker.
"""

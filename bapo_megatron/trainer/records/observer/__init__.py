"""Experiment trackers (W&B, trackio, MLflow), each in an observer process that tails the files of a run.

A tracker may hang, fail or be slow: the run only writes its files. ``processes.py`` is the run's side,
``__main__.py`` the process.
"""

"""Trackers (W&B, trackio, MLflow), each in a process of its own that follows the files of a run.

A tracker may hang, fail or be slow: the run writes its files and goes on. ``process.py`` is the run's side,
``__main__.py`` the process.
"""

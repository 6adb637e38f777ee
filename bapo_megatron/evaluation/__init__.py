"""Evaluation (``bapo eval``) of a checkpoint on benchmark suites: sampling, scoring, metrics, comparison.

``command.py`` parses the flags and compares two evaluations; ``run.evaluate`` runs one.
"""

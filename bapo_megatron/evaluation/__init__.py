"""Evaluation (``bapo eval``): benchmark suites, scored responses, metrics with confidence intervals.

``command.py`` parses the flags and compares two evaluations, ``run.py`` runs one.
"""

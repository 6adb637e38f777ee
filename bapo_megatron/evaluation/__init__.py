"""Evaluation (``bapo eval``): benchmark suites, scored responses, metrics with confidence intervals.

``command.py`` parses the flags, ``run.py`` makes the evaluation, ``comparison.py`` compares two.
"""

"""Evaluation (``bapo eval``): benchmark suites, scored responses, metrics with confidence intervals."""

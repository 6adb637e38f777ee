"""Evaluation: benchmark suites, sampled and scored responses, metrics with confidence intervals."""

"""Corrections that combine with any loss: rejection of whole responses, truncated importance weights.

Pure functions on numpy arrays; ``trainer/corrections.py`` applies them to the samples of a step.
"""

"""Corrections that combine with any loss: rejection of whole responses, truncated importance weights.

Pure functions; ``trainer/corrections.py`` computes the weights once a step, and rejects before each update.
"""

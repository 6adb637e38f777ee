"""Corrections that combine with any loss: rejection of whole responses, truncated importance weights."""

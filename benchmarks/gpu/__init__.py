"""Sections of ``benchmarks/gpu_check.py``: each yields its rows as it measures them."""

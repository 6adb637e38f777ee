"""``bapo verify-parallel``: whether two parallel layouts compute the same on one batch of sequences.

``check.py`` starts the layouts and measures each, ``comparison.py`` compares two.
"""

"""``bapo verify-parallel``: whether two parallel layouts compute the same on one batch of sequences.

``check.py`` starts the layouts and measures each, ``layout_reference.py`` stores one and compares two.
"""

"""``bapo verify-parallel``: whether two parallel layouts compute the same on one batch of sequences.

``command.py`` starts the layouts, ``check.py`` measures one, ``comparison.py`` compares two.
"""

"""Dataset preparation (``bapo data prepare``): converts public datasets to the format of runs.

``command.py`` parses the flags and does the work, with sources, schema adapters, filters and a data card.
"""

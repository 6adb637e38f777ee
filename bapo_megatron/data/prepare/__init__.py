"""Dataset preparation (``bapo data prepare``): public datasets to the one format of runs and evaluations.

``command.py`` parses the flags and does the work, by sources, schema adapters, filters and a data card.
"""

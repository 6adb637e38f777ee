"""Dataset preparation (``bapo data prepare``): public datasets to the one format of runs and evaluations.

``command.py`` parses the flags, ``pipeline.py`` does the work: sources, schema adapters, filters, data card.
"""

"""Dataset preparation (``bapo data prepare``): converts public datasets to the format of runs.

``command.prepare(options)`` does the work, with sources, schema adapters, filters and a data card.
"""

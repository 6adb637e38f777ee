"""``bapo report`` (``page.py``): self-contained HTML page of a run, or of several compared, and PNG plots."""

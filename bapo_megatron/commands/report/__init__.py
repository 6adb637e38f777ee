"""``bapo report``: self-contained HTML page of one run, or of several compared, with PNG plots."""

"""``bapo report``: self-contained HTML page of a run, or of several compared, with plots as PNG."""

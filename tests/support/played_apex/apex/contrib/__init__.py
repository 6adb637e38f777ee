"""A package of apex."""

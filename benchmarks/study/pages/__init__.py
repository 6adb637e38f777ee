"""Markdown document of a study: prose, tables and figures."""

"""The document of a study: its words, tables and pictures."""

"""Output of a rehearsal: the text page, the JSON, and the verdict on memory."""

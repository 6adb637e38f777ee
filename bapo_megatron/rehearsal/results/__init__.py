"""What a rehearsal says: the JSON, the page, and the verdict."""

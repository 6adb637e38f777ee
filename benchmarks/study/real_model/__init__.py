"""Third study: stale data on a real pretrained model, at a task where BAPO's search may act."""

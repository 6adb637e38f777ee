"""How good a model is: suites, sampled and judged responses, and what their numbers can tell."""

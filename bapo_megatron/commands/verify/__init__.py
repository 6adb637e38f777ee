"""`bapo verify-parallel`: a canary batch at two layouts, compared."""

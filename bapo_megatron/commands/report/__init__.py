"""`bapo report`: runs on one self-contained page, their pictures as PNG beside it."""

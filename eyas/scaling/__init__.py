"""How acceptance grows with training data: heads of several kinds on nested parts of it, everything else equal."""

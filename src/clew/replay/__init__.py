"""A recorded step executed again, with every operation under the lens."""

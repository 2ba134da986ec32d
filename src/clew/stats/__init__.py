"""Tensor to numbers: the definition of each statistic, the slow reference and the fast kernels."""

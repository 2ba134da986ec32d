"""Shipped with the package: made-up runs and trainings to test against."""

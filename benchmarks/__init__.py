"""What recording costs, against the plain loop in the same process; ``python -m benchmarks`` prints it."""

"""The run folder: written without loss, read without a framework."""

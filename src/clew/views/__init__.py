"""What to show, before how to draw it."""

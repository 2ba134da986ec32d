"""How to draw a view: terminal, HTML, JSON."""

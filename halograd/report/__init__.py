"""Reports of a run: its state in lines, and a page with curves, tables and pictures."""

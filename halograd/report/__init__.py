"""What a run did, for people: its state in lines, and a page with curves, tables and pictures."""

"""The folder of a run: its files, and what of a live run goes into them."""

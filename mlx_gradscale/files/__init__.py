"""Files written whole or not at all, read within bounds, and text for people."""

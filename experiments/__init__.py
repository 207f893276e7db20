"""Our own studies: the tables of the paper, and what goes beyond them. Run from a checkout."""

"""How processes leave each other word: a store, a turn, a table, a failure."""

"""Mixed precision: which dtype each tensor has, casts, autocast of plain Cells, loss scaling."""

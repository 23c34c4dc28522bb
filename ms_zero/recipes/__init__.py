"""Recipes: the only place that joins a model with parallelism."""

"""Arithmetic models of a run: FLOPs, memory, traffic. Imports neither mindspore nor numpy."""

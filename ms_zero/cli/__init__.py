"""The ``ms-zero`` command: argument parsing, the worker entry point and the launcher."""

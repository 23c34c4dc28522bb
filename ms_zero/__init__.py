"""ms_zero: a MindSpore-native, Ascend-first toolkit for training large models.

Importing this package imports neither mindspore nor numpy; submodules do so when they are used.
"""

__version__ = "0.1.0"

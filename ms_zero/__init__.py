"""ms_zero: a MindSpore-native, Ascend-first toolkit for training large models.

Importing this package imports neither mindspore nor numpy; submodules do so when they are used.
`ms_zero.setup_training("gpt3-175b")` returns the run config of a named size, see `ms_zero.presets`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_zero.presets import setup_training

__all__ = ["__version__", "setup_training"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is asked for, so that the package itself stays light."""
    if name == "setup_training":
        from ms_zero.presets import setup_training

        return setup_training
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Static-shape, CUDA-graph-friendly attention runtime: one captured graph per decode step."""

import importlib
import typing

from graphattn import versions  # noqa: F401  # first: what is too old is named before it fails

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from graphattn.door import *  # noqa: F403  # what type checkers see; `__all__` is there
else:

    def __getattr__(name: str) -> object:
        """Load everything public with the first name that is asked for: `graphattn plan`, and what
        else only reads text, starts without torch.
        """
        door = importlib.import_module("graphattn.door")
        globals().update({public: getattr(door, public) for public in (*door.__all__, "__all__")})
        if name not in globals():
            raise AttributeError(f"module 'graphattn' has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        """With the public names, loaded or not."""
        return sorted({*globals(), *__getattr__("__all__")})

"""Nested arguments of operations: tuples, lists and dictionaries, and nothing else.

Torch's pytrees do the same for any container and take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in `tree` that is no container, in order."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def mapped(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf of type `kind` changed; named tuples become plain ones."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple([mapped(kind, change, item) for item in tree])
    if isinstance(tree, list):
        return [mapped(kind, change, item) for item in tree]
    if isinstance(tree, dict):
        return {key: mapped(kind, change, item) for key, item in tree.items()}
    return tree

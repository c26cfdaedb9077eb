"""The text of the miniature: the language reference that every Python installation carries.

Topics quote each other, so each paragraph counts once, where it stands first in the order of topic
names. Held out are the topics from `HELD_OUT_FROM` on: a tenth, and no paragraph that was trained
on. Token ids are bytes; `END` closes a topic.
"""

from __future__ import annotations

from pydoc_data.topics import topics

END = 256
HELD_OUT_FROM = "typesmapping"


def training_ids() -> list[int]:
    """The topics before `HELD_OUT_FROM`, one after the other."""
    return [i for name, ids in _documents().items() if name < HELD_OUT_FROM for i in ids]


def held_out_ids() -> list[int]:
    """The other topics, one after the other."""
    return [i for name, ids in _documents().items() if name >= HELD_OUT_FROM for i in ids]


def held_out_prompts(count: int, length: int) -> list[list[int]]:
    """`count` pieces of `length` tokens, spread evenly over the held-out text."""
    ids = held_out_ids()
    return [ids[start : start + length] for start in range(0, len(ids), len(ids) // count)][:count]


def _documents() -> dict[str, list[int]]:
    """Topic name -> bytes of its paragraphs that no earlier topic has, then `END`."""
    seen: set[str] = set()
    documents = {}
    for name in sorted(topics):
        own = [p for p in dict.fromkeys(topics[name].split("\n\n")) if p not in seen]
        seen.update(own)
        if own:
            documents[name] = [*"\n\n".join(own).encode(), END]
    return documents

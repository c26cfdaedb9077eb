"""Tables of an sqlite export, read over every version of their schema.

Tables are made lazily and columns come and go between versions: a missing table has no rows, a
missing column is None in every row. Text is stored as such or as an id of `StringIds`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from graphattn.errors import wrong

RECORD = (
    "Record one with profiles/nsys.sh, or: nsys profile --trace=cuda,nvtx --cuda-graph-trace=node "
    "-o NAME COMMAND, then nsys export --type sqlite NAME.nsys-rep"
)


class Tables:
    """The tables of an open database. Raises `ConfigError` when it is none of nsys."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
        try:
            names = database.execute(
                "select name from sqlite_master where type in ('table','view')"
            )
            self._columns = {name: self._columns_of(name) for (name,) in names}
        except sqlite3.DatabaseError as error:
            raise wrong("FILE", "an sqlite export of nsys", f"{path}: {error}", RECORD) from None
        if "StringIds" not in self._columns:
            got = f"{path} with {', '.join(sorted(self._columns)) or 'no tables'}"
            raise wrong("FILE", "an sqlite export of nsys, with a table StringIds", got, RECORD)
        self._strings = dict(self.rows("StringIds", "id", "value"))

    def __contains__(self, table: str) -> bool:
        return table in self._columns

    def has(self, table: str, column: str) -> bool:
        """Whether the table has this column."""
        return column in self._columns.get(table, ())

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """The rows of a table; None for columns that it lacks, no rows if there is no table."""
        if table in self._columns:
            have = self._columns[table]
            terms = (f'"{name}"' if name in have else "null" for name in columns)
            yield from self._database.execute(f'select {", ".join(terms)} from "{table}"')

    def text(self, *values: object) -> str:
        """The first of `values` that is a text, or the id of one that is not empty."""
        for value in values:
            text = value if isinstance(value, str) else self._strings.get(value)
            if text:
                return str(text)
        return ""

    def _columns_of(self, table: str) -> frozenset[str]:
        return frozenset(row[1] for row in self._database.execute(f'pragma table_info("{table}")'))


@contextmanager
def open_tables(path: Path) -> Iterator[Tables]:
    """The tables of the database at `path`, which is only read."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        yield Tables(database, path)

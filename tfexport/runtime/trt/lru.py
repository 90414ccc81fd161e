"""A few things that are dear to make, the longest unused one given up for a new one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What has something to free."""

    def close(self) -> None:
        """Free it."""
        ...


T = TypeVar("T", bound=Closable)


class LruCache(Generic[T]):
    """The most recently used things by key. What it gives up it closes."""

    def __init__(self, most: int, before_close: Callable[[], None]) -> None:
        """Keep `most` things; `before_close` is called before some are closed."""
        self._most, self._before_close = most, before_close
        self._items: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what stands under `key`, made if it is not there."""
        found = self._items.pop(key, None)
        if found is None:
            if len(self._items) == self._most:
                self._before_close()
                self._items.pop(next(iter(self._items))).close()
            found = make()
        self._items[key] = found  # dictionaries keep the order in which keys came
        return found

    def clear(self) -> None:
        """Give up everything."""
        if self._items:
            self._before_close()
        while self._items:
            self._items.popitem()[1].close()

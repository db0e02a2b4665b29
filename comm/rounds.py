"""Set-ups that share their collectives: generators that yield requests, and get the replies of each round together.

A set-up needs several collectives. A program has hundreds of set-ups, and a collective takes long with many ranks on
few cores. A set-up that is a generator, and yields its requests, shares its collectives with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

__all__ = ["side_by_side"]

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Result = TypeVar("Result")


def side_by_side(
    steps: Sequence[Generator[Request, Reply, Result]], serve: Callable[[list[Request]], Sequence[Reply]]
) -> list[Result]:
    """Run the generators, and return their return values in order.

    `serve` gets the requests of a round and returns the replies; it is called as long as there are requests. The
    function is collective if `serve` is.

    >>> def area(name):
    ...     width = yield name + " wide"
    ...     height = yield name + " high"
    ...     return width * height
    >>> def serve(requests):
    ...     print(requests)
    ...     return [len(text) for text in requests]
    >>> side_by_side([area("door"), area("wall")], serve)
    ['door wide', 'wall wide']
    ['door high', 'wall high']
    [81, 81]
    """
    results: dict[int, Result] = {}
    replies: dict[int, Any] = dict.fromkeys(range(len(steps)))  # sending None starts a generator
    while replies:
        requests: dict[int, Request] = {}
        for number, reply in replies.items():
            try:
                requests[number] = steps[number].send(reply)
            except StopIteration as end:
                results[number] = end.value
        # A dict keeps its order, so that all ranks pass the requests, and with them their collectives, in one order.
        replies = dict(zip(requests, serve(list(requests.values())))) if requests else {}
    return [results[number] for number in range(len(steps))]

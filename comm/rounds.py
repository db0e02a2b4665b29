"""Set-ups that share their collectives: generators that yield requests, and get the replies of each round together.

A set-up needs several collectives. A program has hundreds of set-ups, and a collective takes long with many ranks on
few cores. A set-up that is a generator, and yields its requests, shares its collectives with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

__all__ = ["side_by_side"]

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Made = TypeVar("Made")


def side_by_side(
    steps: Sequence[Generator[Question, Answer, Made]], answer: Callable[[list[Question]], Sequence[Answer]]
) -> list[Made]:
    """Run the generators, and return their return values in order.

    `answer` gets the requests of a round and returns the replies; it is called as long as there are requests. The
    function is collective if `answer` is.

    >>> def area(name):
    ...     width = yield name + " wide"
    ...     height = yield name + " high"
    ...     return width * height
    >>> def answer(requests):
    ...     print(requests)
    ...     return [len(text) for text in requests]
    >>> side_by_side([area("door"), area("wall")], answer)
    ['door wide', 'wall wide']
    ['door high', 'wall high']
    [81, 81]
    """
    results: dict[int, Made] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(steps)))  # sending None starts a generator
    while answers:
        questions: dict[int, Question] = {}
        for number, reply in answers.items():
            try:
                questions[number] = steps[number].send(reply)
            except StopIteration as end:
                results[number] = end.value
        answers = dict(zip(questions, answer(list(questions.values())))) if questions else {}
    return [results[number] for number in range(len(steps))]

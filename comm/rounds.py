"""Set-ups side by side: generators that ask for something, whose questions of a round are answered together.

To set one thing up, ranks meet some times; a program has hundreds of them, and many ranks on few cores take long to
meet. Written as a generator that yields what it asks for, a set-up shares its meetings with all others.
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
    """Return what the generators return, in their order.

    Collective if `answer` is, which is given the questions of a round and is called as long as there are some.

    >>> def area(name):
    ...     width = yield name + " wide"
    ...     height = yield name + " high"
    ...     return width * height
    >>> def answer(asked):
    ...     print(asked)
    ...     return [len(text) for text in asked]
    >>> side_by_side([area("door"), area("wall")], answer)
    ['door wide', 'wall wide']
    ['door high', 'wall high']
    [81, 81]
    """
    made: dict[int, Made] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(steps)))  # to send None begins a generator
    while answers:
        asked: dict[int, Question] = {}
        for number, given in answers.items():
            try:
                asked[number] = steps[number].send(given)
            except StopIteration as end:
                made[number] = end.value
        answers = dict(zip(asked, answer(list(asked.values())))) if asked else {}
    return [made[number] for number in range(len(steps))]

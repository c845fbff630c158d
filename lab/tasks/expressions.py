"""The value of an integer expression that a policy wrote: the text is untrusted, so nothing executes or recurses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class BadExpression(ValueError):
    """The text is not an expression by the rules."""


def evaluate(text: str, operations: Collection[str], given: Counter[str]) -> tuple[int, Counter[str]]:
    """The exact value, and how often each number was used; BadExpression for anything malformed.

    Grammar: numbers of `given`, written as there and each at most as often; the binary `operations`, from the left at
    equal precedence; parentheses. No signs, no spaces. A quotient must be a whole number. Depth costs only memory, on
    two stacks, and no value grows without bound, because no number is used more often than given.
    """
    values: list[int] = []
    waiting: list[str] = []  # operations and open parentheses whose right side is not complete
    used: Counter[str] = Counter()
    wants_value = True
    for token in _tokens(text):
        # Both counts are 0 for a token that is no number of the problem: it fails the comparison.
        if wants_value and used[token] < given[token]:
            used[token] += 1
            values.append(int(token))
            wants_value = False
        elif wants_value and token == "(":
            waiting.append(token)
        elif not wants_value and token == ")":
            while waiting and waiting[-1] != "(":
                _apply(values, waiting.pop())
            if not waiting:
                raise BadExpression("a parenthesis is closed that was not open")
            waiting.pop()
        elif not wants_value and token in operations:
            # An open parenthesis has precedence 0, so that nothing before it is applied.
            # With >= and not >, operations of equal precedence are applied from the left.
            while waiting and PRECEDENCE.get(waiting[-1], 0) >= PRECEDENCE[token]:
                _apply(values, waiting.pop())
            waiting.append(token)
            wants_value = True
        else:
            raise BadExpression(f"{token!r} may not stand there")
    if wants_value:
        raise BadExpression("it ends where a number should stand")
    while waiting:
        _apply(values, waiting.pop())
    return values.pop(), used


def _tokens(text: str) -> list[str]:
    """Runs of digits, and every other character alone."""
    tokens: list[str] = []
    in_number = False
    for c in text:
        is_digit = c in "0123456789"
        if is_digit and in_number:
            tokens[-1] += c
        else:
            tokens.append(c)
        in_number = is_digit
    return tokens


def _apply(values: list[int], operation: str) -> None:
    if operation == "(":
        raise BadExpression("a parenthesis stays open")
    right, left = values.pop(), values.pop()
    if operation == "/":
        if right == 0 or left % right != 0:
            raise BadExpression(f"{left}/{right} is not a whole number")
        values.append(left // right)
    else:
        values.append({"+": left + right, "-": left - right, "*": left * right}[operation])

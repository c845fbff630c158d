"""Three ways to write out a sum or a difference: the cold-start teachers of the arithmetic task.

MiniRL (arXiv 2512.01374, Sec. 4.5) starts RL from models that three other models taught. Here the teachers differ in
their text, not in their correctness: each ends in `#answer`, and only the answer is verified.

    503-278=    columns         3-8-0=15;0-7-1=12;5-2-1=02#225
                place_values    500-200=300;0-70=-70;3-8=-5;300-70=230;230-5=225#225
                running         503-200=303;303-70=233;233-8=225#225
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARK = "#"

Style = Callable[[Sequence[int], str], str]
"""From the numbers and their sign, `+` or `-`, to the response without its end token."""


def columns(numbers: Sequence[int], sign: str) -> str:
    """One step per column, from the last to the first: its digits, the carry of the step before, and two figures.

    The figures are the carry to the next column and the digit of this one. In a difference the first is the borrow:
    3-8-0 = -5 = 5 - 10*1 is written 15.
    """
    width = max(len(str(number)) for number in numbers)
    carry, steps, figures = 0, [], ""
    for column in range(1, width + 1):
        digits = [int(str(number).zfill(width)[-column]) for number in numbers]
        others = sum(digits[1:]) + carry
        # Floor division makes both cases one: total = 10 * carry + figure, or -10 * borrow + figure.
        tens, figure = divmod(digits[0] + others if sign == "+" else digits[0] - others, 10)
        steps.append(f"{sign.join(map(str, [*digits, carry]))}={abs(tens)}{figure}")
        carry, figures = abs(tens), f"{figure}{figures}"
    return _ended(steps, f"{carry}{figures}".lstrip("0") or "0")


def place_values(numbers: Sequence[int], sign: str) -> str:
    """One step per column, from the first to the last, by place value; then the columns' results, added one by one."""
    columns = [[value for _, value in parts] for parts in zip(*map(_places, numbers), strict=True)]
    parts = [values[0] + sum(values[1:]) * (1 if sign == "+" else -1) for values in columns]
    steps = [f"{sign.join(map(str, values))}={part}" for values, part in zip(columns, parts, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        steps.append(f"{total}{'+' if part >= 0 else '-'}{abs(part)}={total + part}")
        total += part
    return _ended(steps, str(total))


def running(numbers: Sequence[int], sign: str) -> str:
    """The first number, plus or minus each figure of the others by place value, one per step; a 0 takes no step."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        for figure, value in _places(number):
            if figure:
                after = total + value if sign == "+" else total - value
                steps.append(f"{total}{sign}{value}={after}")
                total = after
    return _ended(steps, str(total))


STYLES: dict[str, Style] = {"columns": columns, "place_values": place_values, "running": running}
"""The teachers by name; the first is the default."""


def longest(digits: int, num_terms: int, sign: str) -> int:
    """Characters of the longest response of any style to problems of that many digits, a bound that is reached."""
    low, high = int("1" * digits), int("9" * digits)
    # Sums are longest where all figures are 9; differences where no step loses a figure, or where most are negative.
    mixed = (int("9" + "1" * (digits - 1)), int("1" + "9" * (digits - 1)))
    worst = [(high,) * num_terms] if sign == "+" else [(high, low), mixed]
    return max(len(style(numbers, sign)) for style in STYLES.values() for numbers in worst)


def _places(number: int) -> list[tuple[int, int]]:
    """Each figure with its place value, from the first: 503 is (5, 500), (0, 0), (3, 3)."""
    text = str(number)
    return [(int(c), int(c) * 10 ** (len(text) - 1 - i)) for i, c in enumerate(text)]


def _ended(steps: Sequence[str], answer: str) -> str:
    return f"{';'.join(steps)}{MARK}{answer}"

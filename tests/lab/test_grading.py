r"""Laws of grading: equal values are right in any form, the last box decides, and no answer can stop the grader."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tasks import grading
from lab.tasks.grading import boxed, grade, is_parseable

EQUAL = [
    ("1/2", r"\frac{1}{2}", "0.5", r"\dfrac12", "50\\%"),
    ("42", "42.0", "042"),
    ("12345", "12,345"),
    ("x^2+2x+1", "(x+1)^2", "1+x(x+2)"),
    ("[0,1)", r"[0, \frac{2}{2})", r"\left[0,1\right)"),
    (r"(-\infty,3]", r"(-\infty, 3]"),
    (r"\{1,2,3\}", "3,2,1"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt 2}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"2\pi", r"\pi+\pi"),
    ("5", "x=5", r"5\text{ cm}"),
    ("1/3", "0.333333"),
    ("1/3000", "0.000333", "0.000333333"),
    (r"1.6\times 10^{-19}", r"16\times 10^{-20}", r"0.00016 \cdot 10^{-15}"),
]
UNEQUAL = [
    ("1/2", "2/1"),
    ("1/2", "0.51"),
    ("42", "-42"),
    ("x+1", "y+1"),
    ("x^2+2x+1", "(x-1)^2"),
    ("[0,1)", "(0,1)"),
    ("[0,1)", "[0,1]"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("2", "1,2,3"),
    (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}"),
    (r"-6.6\times10^{-34}", r"6.626\times10^{-34}"),
    ("0.00000005", "0.00000035"),
    ("0.000001", "0.0000012"),
    ("0", "0.0000001"),
]


@pytest.mark.parametrize("forms", EQUAL)
def test_equal_values_are_right_in_any_form(forms):
    """Every form of a value is right where any other form of it is the answer."""
    for answer in forms:
        for response in forms:
            assert grade(rf"So it is \boxed{{{response}}}.", answer) == 1.0, (answer, response)


@pytest.mark.parametrize(("answer", "response"), UNEQUAL)
def test_other_values_are_wrong(answer, response):
    """A different number, expression, interval or set is wrong, whichever of the two is the answer."""
    assert grade(rf"So it is \boxed{{{response}}}.", answer) == 0.0
    assert grade(rf"So it is \boxed{{{answer}}}.", response) == 0.0


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_right_exactly_when_equal(a, b):
    """On integers grading is equality."""
    assert grade(rf"\boxed{{{a}}}", str(b)) == float(a == b)
    assert grade(rf"\boxed{{{a}}}", str(a)) == 1.0


def test_the_last_box_that_parses_decides():
    """Earlier boxes do not count, nor do numbers after the last one; a box without content is passed over."""
    assert grade(r"\boxed{1} no, \boxed{2}", "2") == 1.0
    assert grade(r"\boxed{2} no, \boxed{1}", "2") == 0.0
    assert grade(r"\boxed{2} as I said in step 1", "2") == 1.0
    assert grade(r"the final answer is $7$, \boxed{2}", "2") == 1.0
    assert grade(r"\boxed{2}, put within \boxed{ }.", "2") == 1.0
    assert grade(r"\boxed{2} and \boxed{3", "2") == 1.0
    assert grade(r"\boxed{\boxed{2}}", "2") == 1.0


def test_without_a_box_the_last_expression_decides():
    """A response without any box is judged by the last expression in it (R3, App. K); words alone earn nothing."""
    assert grade("First 3, then the answer is 5", "5") == 1.0
    assert grade("First 5, then the answer is 3", "5") == 0.0
    assert grade("I do not know", "5") == 0.0
    assert grade("", "5") == 0.0


def test_boxes_are_found_with_balanced_braces():
    """Braces inside a box belong to it, escaped ones are no braces, and boxes come in the order in which they close."""
    assert boxed(r"\boxed{\frac{1}{2}} \boxed {x_{1}}") == [r"\frac{1}{2}", "x_{1}"]
    assert boxed(r"\boxed{\{1,2\}}") == [r"\{1,2\}"]
    assert boxed(r"\boxed{a \boxed{b}}") == ["b", r"a \boxed{b}"]
    assert boxed(r"}} \boxed{a") == []
    assert boxed(r"\notboxed{a} boxed{b} {c}") == []


PIECES = [*"0123456789+-*/^_=,.(){}[]$ \\xyzπ%", "\\frac", "\\boxed{", "\\sqrt{", "\ud800"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_text_gets_a_reward(text):
    """No text makes grading raise, and the reward is 0 or 1."""
    assert grade(text, "17") in (0.0, 1.0)
    assert is_parseable(text, limit_s=2.0) in (True, False)


HOSTILE = [
    r"\boxed{9^{9^{9^{9}}}}",
    rf"\boxed{{{'(' * 20000}1{')' * 20000}}}",
    r"\boxed{" * 20000 + "3" + "}" * 20000,
    rf"\boxed{{{'1+' * 100000}1}}",
    "$" * 200000,
    r"\boxed{100000000!}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_a_hostile_answer_costs_bounded_time(text):
    """An answer too hard for the algebra system earns 0 within the limit, and the next answer is graded as usual."""
    start = time.process_time(), time.monotonic()
    assert grade(text, "3", limit_s=0.5) == 0.0
    # The limit is CPU time of the worker, so a busy machine needs more wall time for it; 30 s are sixty times as much.
    assert time.monotonic() - start[1] < 30
    assert time.process_time() - start[0] < 1.0
    assert grade(r"\boxed{3}", "3") == 1.0


def test_where_no_timer_of_cpu_time_is_the_clock_ends_a_hostile_answer(monkeypatch):
    """As on Windows; the worker here has a timer, of a limit that it cannot reach first."""
    monkeypatch.setattr(grading, "HAS_CPU_TIMER", False)
    monkeypatch.setattr(grading, "WALL", 0.01)
    assert grade(r"\boxed{3}", "3", limit_s=500.0) == 1.0
    before = grading._WORKER._process
    assert before is not None
    assert grade(HOSTILE[0], "3", limit_s=50.0) == 0.0
    assert before.returncode == -signal.SIGKILL
    assert grade(r"\boxed{3}", "3", limit_s=500.0) == 1.0


def test_a_long_right_answer_is_right():
    """A hundred thousand characters of reasoning before the box cost nothing of the limit."""
    assert grade("We see that $x_1 = 2$ and so on. " * 3000 + r"\boxed{3}", "3", limit_s=1.0) == 1.0


def test_grading_works_in_any_thread():
    """Threads grade at the same time, outside the main one, and each gets the reward of its own question."""
    rewards: dict[int, list[float]] = {}

    def work(k: int) -> None:
        rewards[k] = [grade(rf"\boxed{{{i}}}", str(k)) for i in range(8)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {k: [float(i == k) for i in range(8)] for k in range(8)}


def _grade_in_child(queue) -> None:
    reward = grade(r"\boxed{7}", "7")
    queue.put((reward, grading._WORKER._process.pid))
    grading._WORKER.stop()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_grader_of_its_own():
    """After a fork both processes grade, and neither reads the other's replies."""
    assert grade(r"\boxed{7}", "7") == 1.0
    before = grading._WORKER._process
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_grade_in_child, args=(queue,))
    child.start()
    child.join()
    reward, pid = queue.get()
    assert reward == 1.0
    assert grade(r"\boxed{7}", "8") == 0.0
    assert before is not None
    assert grading._WORKER._process is before
    assert pid != before.pid


def test_a_grader_that_cannot_run_is_an_error_not_a_reward(monkeypatch):
    """A worker that does not start, or that something else killed, raises: it must not look like wrong answers."""
    assert grade(r"\boxed{7}", "7") == 1.0
    process = grading._WORKER._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match="status -9"):
        grade(r"\boxed{7}", "7")
    monkeypatch.setattr(grading.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        grade(r"\boxed{7}", "7")
    monkeypatch.undo()
    assert grade(r"\boxed{7}", "7") == 1.0


def test_grading_is_silent(capfd, caplog):
    """Neither right, wrong, unparseable nor hostile answers print or log anything."""
    for text in (r"\boxed{3}", r"\boxed{\frac{}", "?", r"\boxed{9^{9^{9^{9}}}}"):
        grade(text, "3", limit_s=0.5)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize(
    ("answer", "expected"), [("5", True), ("x+1", True), (r"\frac12", True), ("", False), ("?", False)]
)
def test_parseable_answers(answer, expected):
    """A reference answer counts as readable if Math-Verify finds an expression in it."""
    assert is_parseable(answer) is expected


@given(st.from_regex(grading._NUMBER, fullmatch=True))
@settings(max_examples=30)  # each asks the grading process
def test_a_plain_number_needs_no_asking(answer):
    """An answer taken for parseable by its form alone is parseable by Math-Verify."""
    assert is_parseable(answer)
    assert grading._POOL.ask({"answer": answer, "limit_s": grading.LIMIT_S})

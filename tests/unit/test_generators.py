import random

import pytest

from det_callbacks.trace import generators
from det_callbacks.trace.generators import digest_python_generator


@pytest.fixture(autouse=True)
def same_state_after():
    before = random.getstate()
    yield
    random.setstate(before)


@pytest.mark.parametrize("move", [random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(1)])
def test_python_digest_is_the_same_read_from_memory_and_from_getstate(monkeypatch, move):
    assert generators._python_state is not None
    random.seed(7)
    found = set()
    for _ in range(700):  # past the end of the 624 words, where all of them are made anew
        in_memory = digest_python_generator()
        with monkeypatch.context() as patch:
            patch.setattr(generators, "_python_state", None)
            assert digest_python_generator() == in_memory
        found.add(in_memory)
        move()
    assert len(found) == 700


def test_python_digest_follows_the_state():
    random.seed(7)
    first = digest_python_generator()
    random.random()
    assert digest_python_generator() != first
    random.seed(7)
    assert digest_python_generator() == first
    random.seed(8)
    assert digest_python_generator() != first


def test_a_state_that_lies_elsewhere_is_not_read(monkeypatch):
    monkeypatch.setattr(generators, "_python_random", random.Random(5))
    assert generators._find_python_state() is None

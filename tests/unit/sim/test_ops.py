"""The stream of operations: who sees what, in which order, and that torch has no mode without subscribers."""

import itertools
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sim.ops import OnFunctions, OnOperations, Order, subscribers

pytestmark = pytest.mark.sim

_ATEN = torch.ops.aten


class Seen(OnOperations):
    """Notes what it is given in a list that several share; does `also` before it goes on."""

    def __init__(self, order, seen, also=None):
        self.order, self.seen, self.also = order, seen, also

    def handle(self, func, types, args, kwargs, proceed):
        self.seen.append((self.order, func._opname))
        if self.also is not None:
            self.also()
        return proceed(*args, **kwargs)


class Declining(Seen):
    """Declines what is no plain tensor."""

    def handle(self, func, types, args, kwargs, proceed):
        if any(kind is not torch.Tensor for kind in types):
            return NotImplemented
        return super().handle(func, types, args, kwargs, proceed)


class Twice(OnOperations):
    """Gives sums other arguments, and doubles their results."""

    order, only = Order.NOISE, frozenset({_ATEN.add.Tensor})

    def handle(self, func, types, args, kwargs, proceed):
        return proceed(args[0], 10 * args[1], **kwargs) * 2


class Zero(OnOperations):
    """Answers sums by itself."""

    order = Order.CHOICES

    def handle(self, func, types, args, kwargs, proceed):
        return torch.zeros(2) if func is _ATEN.add.Tensor else proceed(*args, **kwargs)


class Foreign(TorchDispatchMode):
    """A mode of a user's."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(("user", func._opname))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A tensor that consists of another one, as a DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*[arg.inner if isinstance(arg, cls) else arg for arg in args], **(kwargs or {})))


class Calls(OnFunctions):
    """Notes calls of functions."""

    def __init__(self, order, seen):
        self.order, self.seen = order, seen

    def handle(self, func, types, args, kwargs, proceed):
        self.seen.append((self.order, func.__name__))
        return proceed(*args, **kwargs)


def modes():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@pytest.mark.parametrize("order", [*itertools.permutations([Order.CHOICES, Order.NOISE, Order.RACES])])
def test_the_order_is_the_stated_one_whatever_the_order_of_with_is(order):
    seen = []
    one, other, last = (Seen(place, seen) for place in order)
    with one, other, last:
        assert [each.order for each in subscribers()] == [Order.CHOICES, Order.NOISE, Order.RACES]
        torch.ones(2).neg()
    assert [place for place, name in seen if name == "neg"] == [Order.CHOICES, Order.NOISE, Order.RACES]


def test_functions_have_the_same_order():
    seen = []
    with Calls(Order.LATE, seen), Calls(Order.KERNELS, seen), Calls(Order.READS, seen):
        torch.neg(torch.ones(2))
    assert [place for place, name in seen if name == "neg"] == [Order.KERNELS, Order.READS, Order.LATE]


def test_of_two_at_one_place_the_later_one_is_first():
    seen = []
    first, second = Seen(Order.NOISE, seen), Seen(Order.NOISE, seen)
    with first, second:
        assert subscribers() == [second, first]


def test_there_is_one_mode_while_somebody_has_subscribed_and_none_else():
    seen = []
    assert (subscribers(), modes()) == ([], (0, 0))
    with Seen(Order.NOISE, seen):
        with Seen(Order.RACES, seen), Seen(Order.CHOICES, seen), Calls(Order.LATE, seen), Calls(Order.READS, seen):
            assert modes() == (1, 1)
        assert modes() == (1, 0)
    assert (subscribers(), modes()) == ([], (0, 0))


def test_leaving_restores_who_was_there_whoever_leaves_first():
    seen = []
    races, noise = Seen(Order.RACES, seen), Seen(Order.NOISE, seen)
    races.__enter__()
    noise.__enter__()
    races.__exit__(None, None, None)
    assert subscribers() == [noise]
    torch.ones(2).neg()
    noise.__exit__(None, None, None)
    assert modes() == (0, 0)
    assert {place for place, _ in seen} == {Order.NOISE}


def test_an_error_leaves_everything_as_it_was():
    def fail():
        if fails:
            raise ValueError("no")

    seen, fails = [], [True]
    with Seen(Order.CHOICES, seen), Seen(Order.NOISE, seen, fail), Seen(Order.RACES, seen):
        with pytest.raises(ValueError, match="no"):
            torch.ones(2)
        fails.clear()
        seen.clear()
        torch.ones(2)
        assert [place for place, _ in seen] == [Order.CHOICES, Order.NOISE, Order.RACES]
    fails.append(True)
    with pytest.raises(ValueError, match="no"), Seen(Order.NOISE, seen, fail):
        torch.ones(2)
    assert (subscribers(), modes()) == ([], (0, 0))


def test_a_subscriber_answers_by_itself_and_the_others_see_what_it_calls():
    seen, x = [], torch.ones(2)
    with Seen(Order.RECORD, seen), Zero(), Seen(Order.RACES, seen):
        assert (x + x).tolist() == [0.0, 0.0]
    assert [each for each in seen if each[1] != "_local_scalar_dense"] == [
        (Order.RECORD, "add"),
        (Order.RACES, "zeros"),
    ]


def test_a_subscriber_changes_arguments_and_results_and_only_those_behind_it_see_what_it_calls():
    seen, x = [], torch.ones(2)
    with Seen(Order.RACES, seen), Seen(Order.CHOICES, seen), Twice():
        assert (x + x).tolist() == [22.0, 22.0]
    names = [each for each in seen if each[1] in ("add", "mul")]
    assert names == [(Order.CHOICES, "add"), (Order.RACES, "mul"), (Order.RACES, "add"), (Order.RACES, "mul")]


def test_a_subscriber_of_some_operations_is_given_no_others():
    seen, x = [], torch.ones(2)

    class Sums(Seen):
        only = frozenset({_ATEN.add.Tensor})

    with Sums(Order.CHOICES, seen), Sums(Order.RACES, seen):
        x.neg()
        x + x
    with Seen(Order.PRECISION, seen), Sums(Order.RACES, seen):
        x.neg()
    assert seen == [(Order.CHOICES, "add"), (Order.RACES, "add"), (Order.PRECISION, "neg")]


def test_operations_of_a_subscriber_are_seen_as_if_it_had_a_mode_of_its_own():
    class Mode(TorchDispatchMode):
        def __init__(self, subscriber):
            super().__init__()
            self.subscriber = subscriber

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return self.subscriber.handle(func, types, args, kwargs or {}, func)

    x = torch.ones(2)

    def seen_by(as_mode):
        seen = []
        made = [Declining(Order.RACES, seen), Seen(Order.PARTIALS, seen, lambda: x * 2), Twice()]
        made.append(Seen(Order.RECORD, seen, x.neg))
        one, two, three, four = (Mode(each) if as_mode and not isinstance(each, Twice) else each for each in made)
        with one, two, three, four:
            result = Wrapped(x).cos() + Wrapped(x)
        return seen, result.inner.tolist()

    assert seen_by(False) == seen_by(True)


def test_one_that_declines_is_given_the_local_operations_and_those_before_it_are_not():
    seen = []
    with Declining(Order.RACES, seen), Seen(Order.PARTIALS, seen):
        Wrapped(torch.ones(2)).neg()
    assert [each for each in seen if each[1] == "neg"] == [(Order.PARTIALS, "neg"), (Order.RACES, "neg")]
    seen.clear()
    with Seen(Order.RACES, seen), Declining(Order.PARTIALS, seen):
        Wrapped(torch.ones(2)).neg()
    assert [each for each in seen if each[1] == "neg"] == [(Order.PARTIALS, "neg"), (Order.RACES, "neg")]


def test_backward_and_what_it_computes_again_is_seen():
    seen, x = [], torch.ones(2, requires_grad=True)

    def body(x):
        return x.sin().cos()

    with Seen(Order.RACES, seen), Seen(Order.CHOICES, seen):
        out = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        seen.clear()
        out.sum().backward()
    names = [name for place, name in seen if place == Order.CHOICES]
    assert names == [name for place, name in seen if place == Order.RACES]
    assert {"sin", "cos", "sum"} <= set(names)


def test_a_mode_of_the_users_divides_the_stream():
    seen = []
    with Seen(Order.CHOICES, seen), Foreign(seen), Seen(Order.RACES, seen), Seen(Order.NOISE, seen):
        assert [each.order for each in subscribers()] == [Order.NOISE, Order.RACES, Order.CHOICES]
        torch.ones(2).neg()
    assert [place for place, name in seen if name == "neg"] == [Order.NOISE, Order.RACES, "user", Order.CHOICES]
    assert modes() == (0, 0)


def test_one_that_leaves_under_a_mode_of_the_users_leaves_that_one_on():
    seen = []
    races, user = Seen(Order.RACES, seen), Foreign(seen)
    races.__enter__()
    user.__enter__()
    races.__exit__(None, None, None)
    torch.ones(2).neg()
    user.__exit__(None, None, None)
    assert {place for place, _ in seen} == {"user"}
    assert modes() == (0, 0)


def test_without_modes_nobody_sees_and_a_subscriber_may_come():
    seen = []
    with Seen(Order.RACES, seen):
        with _disable_current_modes():
            torch.ones(2)
            assert (seen, subscribers()) == ([], [])
            with Seen(Order.NOISE, seen):
                torch.ones(2)
        assert {place for place, _ in seen} == {Order.NOISE}
        seen.clear()
        torch.ones(2)
    assert {place for place, _ in seen} == {Order.RACES}


def test_another_thread_has_a_stream_of_its_own():
    seen, found = [], []

    def other():
        found.append(subscribers())
        torch.ones(2)

    with Seen(Order.RACES, seen):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert (seen, found) == ([], [[]])


def test_a_subscriber_enters_itself_again_while_it_handles_a_call():
    class Again(OnFunctions):
        order = Order.KERNELS
        calls = ()

        def handle(self, func, types, args, kwargs, proceed):
            self.calls = [*self.calls, func.__name__]
            if func is torch.neg:
                result = proceed(*args, **kwargs)
                with self:
                    return torch.abs(result)
            return proceed(*args, **kwargs)

    x, seen = torch.ones(2), []
    for other in (nullcontext(), Calls(Order.LATE, seen)):
        again = Again()
        with again, other:
            torch.neg(x)
            assert again.calls == ["neg", "abs"]
        assert modes() == (0, 0)
    assert [name for _, name in seen] == ["neg", "abs"]


def later_the_simulator_has_no_other_mode():
    root = Path(__file__).parents[3] / "sim"
    words = ("(TorchDispatchMode)", "(TorchFunctionMode)", ", TorchDispatchMode)", ", TorchFunctionMode)")
    found = {path.name for path in root.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found == {"ops.py"}

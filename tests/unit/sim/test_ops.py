"""The stream of operations: who sees what, in which order, and that torch has no mode without subscribers."""

import itertools
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sim.ops import Level, OnFunctions, OnOperations, mode_before_all, subscribers

pytestmark = pytest.mark.sim

_ADD = torch.ops.aten.add.Tensor


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
    def handle(self, func, types, args, kwargs, proceed):
        if any(kind is not torch.Tensor for kind in types):
            return NotImplemented
        return super().handle(func, types, args, kwargs, proceed)


class Sums(Seen):
    only = frozenset({_ADD})


class Twice(OnOperations):
    """Gives sums other arguments, and doubles their results."""

    order, only = Level.NOISE, frozenset({_ADD})

    def handle(self, func, types, args, kwargs, proceed):
        return proceed(args[0], 10 * args[1], **kwargs) * 2


class Calls(OnFunctions):
    def __init__(self, order, seen):
        self.order, self.seen = order, seen

    def handle(self, func, types, args, kwargs, proceed):
        self.seen.append((self.order, func.__name__))
        return proceed(*args, **kwargs)


class Mode(TorchDispatchMode):
    """A mode of a user's, that does as a subscriber does."""

    def __init__(self, subscriber):
        super().__init__()
        self.subscriber = subscriber

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.subscriber.handle(func, types, args, kwargs or {}, func)


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


def modes():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def who(seen, name):
    return [order for order, each in seen if each == name]


@pytest.mark.parametrize("order", [*itertools.permutations([Level.CHOICES, Level.NOISE, Level.RACES])])
def test_the_order_is_the_stated_one_whatever_the_order_of_with_is(order):
    seen = []
    one, other, last = (Seen(each, seen) for each in order)
    with one, other, last:
        assert [each.order for each in subscribers()] == [Level.CHOICES, Level.NOISE, Level.RACES]
        torch.ones(2).neg()
    assert who(seen, "neg") == [Level.CHOICES, Level.NOISE, Level.RACES]


def test_functions_have_a_stated_order_too_and_of_two_equals_the_later_is_first():
    seen = []
    with Calls(Level.LATE, seen), Calls(Level.KERNELS, seen), Calls(Level.READS, seen):
        torch.neg(torch.ones(2))
    assert who(seen, "neg") == [Level.KERNELS, Level.READS, Level.LATE]
    with Seen(Level.NOISE, seen) as first, Seen(Level.NOISE, seen) as second:
        assert subscribers() == [second, first]


def test_there_is_one_mode_while_somebody_has_subscribed_and_none_else():
    seen = []
    assert (subscribers(), modes()) == ([], (0, 0))
    with Seen(Level.NOISE, seen):
        with Seen(Level.RACES, seen), Seen(Level.CHOICES, seen), Calls(Level.LATE, seen), Calls(Level.READS, seen):
            assert modes() == (1, 1)
        assert modes() == (1, 0)
    assert (subscribers(), modes()) == ([], (0, 0))


def test_leaving_restores_who_was_there_whoever_leaves_first():
    seen = []
    races, noise, user = Seen(Level.RACES, seen), Seen(Level.NOISE, seen), Mode(Seen("user", seen))
    races.__enter__()
    noise.__enter__()
    user.__enter__()
    races.__exit__(None, None, None)
    torch.ones(2).neg()
    assert who(seen, "neg") == ["user", Level.NOISE]
    noise.__exit__(None, None, None)
    torch.ones(2).abs()
    assert who(seen, "abs") == ["user"]
    user.__exit__(None, None, None)
    assert modes() == (0, 0)


def test_an_error_leaves_everything_as_it_was():
    def fail():
        if fails:
            raise ValueError("no")

    seen, fails = [], [True]
    with Seen(Level.CHOICES, seen), Seen(Level.NOISE, seen, fail), Seen(Level.RACES, seen):
        with pytest.raises(ValueError, match="no"):
            torch.ones(2)
        fails.clear()
        seen.clear()
        torch.ones(2)
        assert [order for order, _ in seen] == [Level.CHOICES, Level.NOISE, Level.RACES]
    assert (subscribers(), modes()) == ([], (0, 0))


def test_a_subscriber_answers_by_itself_and_only_those_behind_it_see_what_it_calls():
    class Zero(OnOperations):
        order = Level.CHOICES

        def handle(self, func, types, args, kwargs, proceed):
            return torch.zeros(2) if func is _ADD else proceed(*args, **kwargs)

    seen, x = [], torch.ones(2)
    with Seen(Level.RECORD, seen), Zero(), Seen(Level.RACES, seen):
        out = x + x
    assert (seen, out.tolist()) == ([(Level.RECORD, "add"), (Level.RACES, "zeros")], [0.0, 0.0])
    seen.clear()
    with Seen(Level.RACES, seen), Seen(Level.CHOICES, seen), Twice():
        out = x + x
    assert seen == [(Level.CHOICES, "add"), (Level.RACES, "mul"), (Level.RACES, "add"), (Level.RACES, "mul")]
    assert out.tolist() == [22.0, 22.0]


def test_a_subscriber_of_some_operations_is_given_no_others():
    seen, x = [], torch.ones(2)
    with Sums(Level.CHOICES, seen), Sums(Level.RACES, seen):
        x.neg()
        x + x
    with Seen(Level.PRECISION, seen), Sums(Level.RACES, seen):
        x.neg()
    assert seen == [(Level.CHOICES, "add"), (Level.RACES, "add"), (Level.PRECISION, "neg")]


def test_a_stream_is_as_good_as_a_mode_for_each_subscriber():
    x = torch.ones(2)

    def seen_by(as_mode):
        seen = []
        made = [Declining(Level.RACES, seen), Seen(Level.PARTIALS, seen, lambda: x * 2), Twice()]
        made += [Seen(Level.PRECISION, seen, lambda: x + x), Seen(Level.RECORD, seen, x.neg)]
        one, two, three, four, five = (Mode(each) if as_mode and not each.only else each for each in made)
        with one, two, three, four, five:
            result = Wrapped(x).cos() + Wrapped(x)
        return seen, result.inner.tolist()

    assert seen_by(False) == seen_by(True)


@pytest.mark.parametrize(("one", "other"), [(Declining, Seen), (Seen, Declining)])
def test_one_that_declines_a_dtensor_is_given_its_local_operations(one, other):
    seen = []
    with one(Level.RACES, seen), other(Level.PARTIALS, seen):
        Wrapped(torch.ones(2)).neg()
    assert who(seen, "neg") == [Level.PARTIALS, Level.RACES]


def test_backward_and_what_it_computes_again_is_seen():
    seen, x = [], torch.ones(2, requires_grad=True)
    with Seen(Level.RACES, seen), Seen(Level.CHOICES, seen):
        out = torch.utils.checkpoint.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum()
        seen.clear()
        out.backward()
    names = [name for order, name in seen if order == Level.CHOICES]
    assert names == [name for order, name in seen if order == Level.RACES]
    assert {"sin", "cos", "mul"} <= set(names)


def test_a_mode_of_the_users_divides_the_stream():
    seen = []
    with Seen(Level.CHOICES, seen), Mode(Seen("user", seen)):
        assert mode_before_all()
        with Seen(Level.RACES, seen), Seen(Level.NOISE, seen):
            assert [each.order for each in subscribers()] == [Level.NOISE, Level.RACES, Level.CHOICES]
            assert not mode_before_all()
            torch.ones(2).neg()
    assert who(seen, "neg") == [Level.NOISE, Level.RACES, "user", Level.CHOICES]
    assert modes() == (0, 0)


def test_without_modes_and_on_another_thread_nobody_sees_and_a_subscriber_may_come():
    def alone():
        torch.ones(2)
        found.append((list(seen), subscribers()))
        with Seen(Level.NOISE, seen):
            torch.ones(2)

    seen, found = [], []
    with Seen(Level.RACES, seen):
        with _disable_current_modes():
            alone()
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join()
        torch.ones(2)
    noise = [(Level.NOISE, "ones")]
    assert (found, seen) == ([([], []), (noise, [])], [*noise, *noise, (Level.RACES, "ones")])


@pytest.mark.parametrize("has_another", [False, True])
def test_a_subscriber_enters_itself_again_while_it_handles_a_call(has_another):
    class Again(OnFunctions):
        order, calls = Level.KERNELS, ()

        def handle(self, func, types, args, kwargs, proceed):
            self.calls = [*self.calls, func.__name__]
            if func is not torch.neg:
                return proceed(*args, **kwargs)
            with self:
                return torch.abs(x)

    x, seen = torch.ones(2), []
    with Again() as again, Calls(Level.LATE, seen) if has_another else nullcontext():
        torch.neg(x)
        assert again.calls == ["neg", "abs"]
    assert modes() == (0, 0)
    assert [name for _, name in seen] == ["abs"] * has_another


def test_the_simulator_has_no_other_mode():
    root = Path(__file__).parents[3] / "sim"
    words = [f"{before}Torch{kind}Mode)" for before in ("(", ", ") for kind in ("Dispatch", "Function")]
    found = {path.name for path in root.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found == {"ops.py", "dispatcher.py"}  # the latter catches one call of torch's own, without other modes

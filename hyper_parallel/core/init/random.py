"""Random numbers by counter: what an element gets depends on its place, a name and a seed, and on nothing before it.

`philox` is Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"). What is made
of its bits uses additions, multiplications, divisions and square roots only. IEEE 754 rounds those in one way, so any
machine gets the same float64 values, alone or in an array of any length; a library's `log` and `cos` do not promise it.
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Draw", "Stream", "exponential", "integers", "normal", "philox", "uniform"]

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
_ROUNDS = 10


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return four random 32-bit words for each counter.

    >>> [f"{int(word):08x}" for word in philox((np.uint64(0),) * 4, (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']

    Args:
        counter: four words, each a uint64 below 2^32 or an array of them; arrays have one shape.
        key: two words below 2^32.

    Source: Philox4x32-10, with the constants of the paper's reference implementation, Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1 = (second >> _HALF) ^ c1 ^ np.uint64(k0), second & _LOW
        c2, c3 = (first >> _HALF) ^ c3 ^ np.uint64(k1), first & _LOW
        k0, k1 = (k0 + _STEPS[0]) % 2**32, (k1 + _STEPS[1]) % 2**32
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Draw:
    """One filling of one tensor: the part of key and counter that all its elements share.

    Args:
        key: two words, a hash of seed and name.
        tag: one more word of that hash, so that the streams of two names do not meet.
        number: how often the tensor was filled before.
    """

    key: tuple[int, int]
    tag: int
    number: int

    def words(self, index: Words) -> tuple[Words, Words]:
        """Return two random 64-bit words for each place, an element's row-major index in the whole tensor."""
        counter = (index & _LOW, index >> _HALF, np.uint64(self.number % 2**32), np.uint64(self.tag))
        a, b, c, d = philox(counter, self.key)
        return a | (b << _HALF), c | (d << _HALF)


@dataclass
class Stream:
    """The draws of one tensor.

    >>> stream = Stream(0, "wq.weight")
    >>> stream.next() == stream.next(), stream.next() == Stream(1, "wq.weight").next()
    (False, False)

    Args:
        seed: any int.
        name: of the tensor, unique in the model.
        draws: how often it was filled.
        children: how many tensors were derived from it since, by where in the code that was.
    """

    seed: int
    name: str
    draws: int = 0
    children: dict[str, int] = field(default_factory=dict)

    def next(self) -> Draw:
        """Return the next draw."""
        digest = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()
        low, high, tag = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8))
        draw = Draw((low, high), tag, self.draws)
        self.draws, self.children = self.draws + 1, {}
        return draw

    def child(self) -> Stream:
        """Return the stream of a tensor that is made like this one, as `torch.empty_like` does."""
        # Counted per place in the code: loops that draw until all is accepted end earlier on some ranks, and that must
        # not move what others, or what comes after the loop, draws later.
        place = _place()
        number = self.children.get(place, 0)
        self.children[place] = number + 1
        return Stream(self.seed, f"{self.name}>{self.draws}.{place}.{number}")


def _place() -> str:
    """Say where in the code of the model, or of torch's initialisers, an operation was called: function and offset.

    Not file and line, so that what is drawn stays the same when code around the function changes.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_name}+{frame.f_lasti}"


def _is_between(module: str) -> bool:
    """Tell whether a module stands between the code that calls an operation and what takes the operation's place."""
    return module.startswith(("hyper_parallel.core.init", "torch.")) and not module.startswith("torch.nn")


def uniform(draw: Draw, index: Words) -> Floats:
    """Return one number from [0, 1) for each place, a multiple of 2^-53."""
    return _fraction(draw.words(index)[0], 53)


def normal(draw: Draw, index: Words) -> Floats:
    """Return one number from the standard normal distribution for each place.

    Source: Box and Muller 1958, r = sqrt(-2 ln u) and x = r cos(2 pi v). The cosine of an angle from the whole circle
    is distributed as the sine of one from its right half, for which one polynomial is enough.
    """
    first, second = draw.words(index)
    radius = _log(_open_fraction(first))
    radius *= -2.0
    np.sqrt(radius, out=radius)
    turn = _open_fraction(second)
    turn *= 2.0
    turn -= 1.0
    radius *= _sine_of_quarters(turn)
    return radius


def exponential(draw: Draw, index: Words) -> Floats:
    """Return one number from the exponential distribution of mean 1 for each place: -ln u."""
    return -_log(_open_fraction(draw.words(index)[0]))


def integers(draw: Draw, index: Words, low: int, high: int) -> npt.NDArray[np.int64]:
    """Return one integer from [low, high) for each place; the range may span up to 2^63."""
    return (draw.words(index)[0] % np.uint64(high - low)).astype(np.int64) + np.int64(low)


def _fraction(word: Words, bits: int) -> Floats:
    result: Floats = (word >> np.uint64(64 - bits)).astype(np.float64)
    result *= 2.0**-bits
    return result


def _open_fraction(word: Words) -> Floats:
    """A number from (0, 1), neither end included: an odd multiple of 2^-53."""
    result = _fraction(word, 52)
    result += 2.0**-53
    return result


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Horner's rule, highest power first; two roundings a step, never a fused one."""
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result += coefficient
        result *= x
    result += coefficients[-1]
    return result


_LN2 = math.log(2.0)
_SQRT_HALF = 0.7071067811865476
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(11, -1, -1))  # of 2 atanh(s) / s, in s^2
_SINE = tuple((-1) ** k * (math.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(12, -1, -1))


def _log(x: Floats) -> Floats:
    """The natural logarithm of numbers from (0, 1): x = m 2^e with m near 1, ln m = 2 atanh((m - 1) / (m + 1))."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    power = (exponent - small).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    s *= _polynomial(s * s, _ATANH)  # |s| < 0.172: the first term left out is below 2^-60 of the sum
    power *= _LN2
    power += s
    return power


def _sine_of_quarters(x: Floats) -> Floats:
    """sin(x pi / 2) for x from (-1, 1), by its Taylor series; the first term left out is below 2^-65."""
    return x * _polynomial(x * x, _SINE)

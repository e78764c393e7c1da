"""torch's CPU generator as it is after any number of draws, without drawing.

torch draws with the Mersenne Twister MT19937. Its next state is a linear function of the state, over the field of two
elements. Let φ be the characteristic polynomial of this function (Matsumoto and Nishimura, 1998, appendix A). The state
after n draws is then the polynomial xⁿ mod φ of the function, applied to the state (Haramoto et al., 2008). A few
milliseconds take the place of billions of draws, and several threads can draw parts of one sequence.

Polynomials are integers here: bit i is the coefficient of xⁱ.
"""

import functools

import numpy as np
import torch

# Parameters of MT19937, named as in the paper.
N, M, W, R, A = 624, 397, 32, 31, 0x9908B0DF
DEGREE = N * W - R
UPPER, LOWER = 0x80000000, 0x7FFFFFFF  # the upper W - R and the lower R bits of a word
STATE = slice(24, 24 + 8 * N)  # the words in the bytes of torch's state, 8 bytes each; draws begin behind them
LOW_BITS = 14  # x to a power below 2**14 is its own remainder mod φ


def generator_after(seed: int, draws: int) -> torch.Generator:
    """A generator of `seed` from which this many words of 32 bits were drawn.

    An fp32 number of `uniform_` takes one word. `normal_` of 16 fp32 numbers and more takes as many words as numbers,
    and 16 more if their number is no multiple of 16.
    """
    generator = torch.Generator().manual_seed(seed)
    if draws == 0:
        return generator
    state = generator.get_state()
    words = np.frombuffer(state.numpy()[STATE].tobytes(), np.uint64).astype(np.uint32)
    for power in _powers(draws):
        words = _applied(power, words)
    state.numpy()[STATE] = np.frombuffer(words.astype(np.uint64).tobytes(), np.uint8)
    return generator.set_state(state)


def _powers(draws: int) -> list[int]:
    """Polynomials whose product is x to the power of `draws`, mod φ."""
    low, high = draws & ((1 << LOW_BITS) - 1), draws >> LOW_BITS
    return [1 << low, *(_square(number) for number in range(high.bit_length()) if high >> number & 1)]


@functools.cache
def _square(number: int) -> int:
    """X to the power of 2**(LOW_BITS + number), mod φ."""
    if number == 0:
        return 1 << (1 << LOW_BITS)
    half = np.frombuffer(_square(number - 1).to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    spread = np.unpackbits(half, bitorder="little").repeat(2)  # a square has the coefficients at even powers
    spread[1::2] = 0
    return _remainder(int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little"))


def _remainder(polynomial: int) -> int:
    """A polynomial mod φ. φ has few coefficients, and its second highest power is 227 below the highest."""
    *lower, _ = _exponents(_characteristic())
    while high := polynomial >> DEGREE:
        polynomial &= (1 << DEGREE) - 1
        for exponent in lower:
            polynomial ^= high << exponent
    return polynomial


@functools.cache
def _characteristic() -> int:
    """φ, by its formula in the paper."""
    long, short = 1 << N ^ 1 << M, 1 << N - 1 ^ 1 << M - 1
    total = _product(*[long] * (W - R), *[short] * R)
    for bit in range(W):
        if A >> bit & 1:
            factors = [*[long] * (W - R), *[short] * (R - 1 - bit)] if bit < R else [long] * (W - 1 - bit)
            total ^= _product(*factors)
    return total


def _product(*factors: int) -> int:
    result = 1
    for factor in factors:
        result = functools.reduce(int.__xor__, (result << exponent for exponent in _exponents(factor)))
    return result


@functools.lru_cache(64)
def _exponents(polynomial: int) -> list[int]:
    bits = np.frombuffer(polynomial.to_bytes(polynomial.bit_length() // 8 + 1, "little"), np.uint8)
    exponents: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    return exponents


def _applied(polynomial: int, state: np.ndarray) -> np.ndarray:
    """The sum of the later states that the polynomial names: state i are the words i to i + N - 1 of the sequence."""
    exponents = _exponents(polynomial)
    sequence = _sequence(state, exponents[-1])
    states = np.lib.stride_tricks.sliding_window_view(sequence, N)
    summed: np.ndarray = np.bitwise_xor.reduce(states[exponents], axis=0)
    return summed


def _sequence(state: np.ndarray, count: int) -> np.ndarray:
    """The words of the state and the next `count` words."""
    words = np.empty(N + count, np.uint32)
    words[:N] = state
    for first in range(0, count, N - M):  # a word depends on words that are N, N - 1 and N - M before it
        last = min(first + N - M, count)
        mixed = words[first:last] & np.uint32(UPPER) | words[first + 1 : last + 1] & np.uint32(LOWER)
        twisted = mixed >> np.uint32(1) ^ np.where(mixed & np.uint32(1), np.uint32(A), np.uint32(0))
        words[N + first : N + last] = words[first + M : last + M] ^ twisted
    return words

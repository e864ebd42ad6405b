"""Random numbers that belong to a cell: a function of names, never of position, batch or device.

A key is 64 bits of hash. Every number is one output of SplitMix64 (Steele, Lea and Flood, 2014,
"Fast splittable pseudorandom number generators") at a counter made of the key, the step and the
lane, so there is no generator to seed, no state to carry and nothing to wait for on a device.
"""

import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from operator import index as as_int
from typing import SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer, the only kind that torch multiplies everywhere."""
    return value - (1 << 64) if value >> 63 else value


def _times(constant: int, step: int | Tensor) -> int | Tensor:
    """Product modulo 2^64; tensors wrap by themselves, Python's integers do not."""
    if isinstance(step, Tensor):
        return step * constant
    return _signed((step * constant) % (1 << 64))


# Constants of SplitMix64: the Weyl increment and the two multipliers of its finaliser.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)

# Odd numbers without structure, so that steps and the kinds of draw never share a counter.
_PER_STEP = _signed(0xD1342543DE82EF95)
_UNIFORM = _signed(0x2545F4914F6CDD1D)
_FORK = _signed(0xA0761D6478BD642F)

_FLOAT64_BITS = 52
_FLOAT32_BITS = 23


def stream_key(seed: SupportsIndex, *names: str | SupportsIndex) -> int:
    """Key of a stream of random numbers.

    Parameters
    ----------
    seed
        The user's seed; any integer.
    names
        What the stream is for. Parts are kept apart: ``("ab", "c")`` is not ``("a", "bc")``, nor
        is ``1`` the same as ``"1"``.

    Returns
    -------
    63 bits of BLAKE2b.
    """
    parts = [as_int(seed), *(name if isinstance(name, str) else as_int(name) for name in names)]
    digest = blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def gene_lanes(names: Sequence[str]) -> Int[Tensor, " genes"]:
    """Lane of each gene for :func:`uniform`, from its name alone."""
    digests = [blake2b(name.encode(), digest_size=8, person=b"gene").digest() for name in names]
    return torch.tensor(
        [int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64
    )


def cell_keys(
    seed: int,
    condition: str,
    set_index: int | Sequence[int],
    *,
    n_cells: int,
    device: torch.device | str = "cpu",
) -> Int[Tensor, "*sets cells"]:
    """Key of every cell of one or several sets of a condition.

    Parameters
    ----------
    seed
        The user's seed.
    condition
        Unambiguous name of the condition.
    set_index
        Number of the set within the condition, or several.
    n_cells
        Cells a set. The first cells have the same keys however many are asked for.
    device
        Where the keys shall lie.

    Returns
    -------
    ``[cells]`` for one set, ``[sets, cells]`` for a sequence.
    """
    one = not isinstance(set_index, Sequence)
    sets = [set_index] if not isinstance(set_index, Sequence) else set_index
    roots = torch.tensor(
        [stream_key(seed, "cells", condition, number) for number in sets], dtype=torch.int64
    )
    keys = _outputs(roots.to(device), n_cells)
    return keys[0] if one else keys


def forked_keys(keys: Int[Tensor, "*cells"], branch: int | Tensor) -> Int[Tensor, "*cells"]:
    """Keys for a branch of a trajectory; branch 0 is the trajectory itself."""
    branch = torch.as_tensor(branch, device=keys.device)
    return torch.where(branch == 0, keys, _mixed(keys + _times(_FORK, branch)))


def normal(
    keys: Int[Tensor, "*cells"],
    width: int,
    *,
    step: int | Tensor = 0,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*cells width"]:
    """Standard normal draws.

    Parameters
    ----------
    keys
        Key of each cell.
    width
        Draws a cell; the first draws are the same however many are asked for.
    step
        What the draws are for, as a number (step of a sampler); a tensor broadcasts to ``keys``.
    dtype
        Of the result. Draws are made in float64, so float32 is that result, rounded.

    Returns
    -------
    ``[..., width]``, by inversion of one uniform each.
    """
    bits = _outputs(_mixed(keys + _times(_PER_STEP, step)), width)
    return torch.erfinv(2 * _unit(bits, torch.float64) - 1).mul_(math.sqrt(2)).to(dtype)


def uniform(
    keys: Int[Tensor, " cells"],
    lanes: Int[Tensor, " genes"],
    *,
    step: int | Tensor = 0,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "cells genes"]:
    """One uniform number per cell and gene, in the open interval from 0 to 1.

    Parameters
    ----------
    keys
        Key of each cell.
    lanes
        Lane of each gene, from :func:`gene_lanes`.
    step
        What the draws are for, as a number; a tensor broadcasts to ``keys``.
    dtype
        ``torch.float64`` (52 random bits) or ``torch.float32`` (23).

    Returns
    -------
    ``[cells, genes]``.
    """
    rows = _mixed(keys + _times(_PER_STEP, step) + _UNIFORM)
    return _unit(_mixed(rows[:, None] + lanes), dtype)


def _outputs(state: Tensor, width: int) -> Tensor:
    """First ``width`` outputs of SplitMix64 from each state."""
    counter = torch.arange(1, width + 1, device=state.device) * _INCREMENT
    return _mixed(state[..., None] + counter)


def _mixed(bits: Tensor) -> Tensor:
    """Finaliser of SplitMix64, in place. Masks turn torch's arithmetic shifts into logical ones."""
    bits ^= (bits >> 30) & ((1 << 34) - 1)
    bits *= _FIRST
    bits ^= (bits >> 27) & ((1 << 37) - 1)
    bits *= _SECOND
    bits ^= (bits >> 31) & ((1 << 33) - 1)
    return bits


def _unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Midpoints of equal cells of the unit interval; both ends stay out after rounding."""
    kept = _FLOAT32_BITS if dtype == torch.float32 else _FLOAT64_BITS
    whole = (bits >> (64 - kept)) & ((1 << kept) - 1)
    return whole.to(dtype).add_(0.5).mul_(2.0**-kept)

"""Several genes a call: a draft guesses, the network checks, and the cells are the network's own.

A guess is kept or thrown away so that nothing of the draft is left in the distribution of cells:
by rejection (Leviathan et al., 2023, algorithm 1; Chen et al., 2023, theorem 1), or by taking the
network's choice from the same uniform number that the draft guessed with. The second keeps fewer
guesses of wide distributions, but its cells are those of plain decoding, one by one.

B cells, T positions of a window, G genes, V bins, D width.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._errors import ConfigError
from perturbdiff.autoregressive._decode import Cells, Decoding, summed_in
from perturbdiff.autoregressive._order import GeneOrder
from perturbdiff.autoregressive._protocol import Cache, Draft, Network
from perturbdiff.autoregressive._sampling import Sampling, inverted


@dataclass(frozen=True, kw_only=True)
class Guessing:
    """How a draft is used.

    Parameters
    ----------
    length
        Genes that are guessed for each call of the network.
    shared
        Whether draft and network choose by the same uniform number, and guesses are kept where they
        agree; else guesses are accepted or rejected at random.
    """

    length: int = 6
    shared: bool = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError("guessing.length", self.length, rule="must be at least 1")


@dataclass(kw_only=True)
class GuessedCells(Cells):
    """Cells with what the draft goes on from, and how its guesses fared."""

    hidden: Float[Tensor, "cells 1 width"]  # at the last gene that was said
    tried: Int[Tensor, " cells"]
    kept: Int[Tensor, " cells"]


class Speculative(Decoding):
    """Several genes a call, in an order that is known beforehand; cells go at their own pace.

    A call covers ``length + 1`` positions of each cell. Near its end a cell looks back on genes
    that it has said already, so that the shape of a call never changes.

    Parameters
    ----------
    network, order, lanes, sampling
        As for every decoding.
    draft
        Guesses hidden values of the network.
    guessing
        How far ahead, and how guesses are checked.
    """

    ends_on_time = False

    def __init__(
        self,
        network: Network,
        order: GeneOrder,
        lanes: Int[Tensor, " genes"],
        *,
        draft: Draft,
        guessing: Guessing | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(network, order, lanes, sampling=sampling)
        if order.drawn:
            rule = "genes that are drawn cannot be guessed ahead; decode without a draft"
            raise ConfigError("order", order.name, rule=rule)
        guessing = guessing or Guessing()
        self.draft = draft
        self.stride = min(guessing.length + 1, self.n_genes)
        self.compared = guessing.shared or self.sampling.greedy
        self.n_draws = 1 if self.compared else 3
        self.steps = torch.arange(self.stride, device=lanes.device)
        # The gene said before each position; at the first none was.
        self.before = torch.cat([lanes.new_tensor([self.n_genes]), self.order])

    def begin(self, cache: Cache, keys: Int[Tensor, " cells"]) -> GuessedCells:
        """Cells of which nothing was said; arguments as for every decoding."""
        fresh = self._fresh(cache, keys)
        hidden = cache.keys.new_zeros(len(keys), 1, self.draft.width, dtype=summed_in(cache))
        none = torch.zeros_like(keys)
        return GuessedCells(**fresh, hidden=hidden, tried=none, kept=none.clone())

    def advance(self, cells: Cells, *, reach: int) -> None:
        """Say as many genes of each cell as the network agrees to, and one more."""
        assert isinstance(cells, GuessedCells)  # made by `begin`
        start = cells.position.clamp_max(reach - self.stride)
        window = start[:, None] + self.steps
        gene, known = self.order[window], window < cells.position[:, None]
        uniform = cells.uniform.gather(2, gene[:, None].expand(-1, self.n_draws, -1))
        said = cells.bins.gather(1, gene)
        guess, guess_logits = self._guesses(cells, gene, uniform[:, 0])
        guess = torch.where(known[:, :-1], said[:, :-1], guess)

        first = self.before[start, None]
        first_bin = cells.bins.gather(1, first.clamp_max(self.n_genes - 1))
        first_bin = first_bin.masked_fill(first == self.n_genes, self.network.n_bins)
        cells.cache.length.copy_(start)
        hidden, _ = self.network.decode(
            cells.cache,
            torch.cat([first, gene[:, :-1]], dim=1),
            torch.cat([first_bin, guess], dim=1),
            next_gene=gene,
            reach=reach,
        )
        logits = self.network.bin_logits(hidden, gene, cells.cache)
        if self.compared:
            own = self.sampling.choose(logits, uniform[:, 0])
            agreed = own[:, :-1] == guess
        else:
            agreed, own = self._rejected(logits, guess_logits, guess, uniform=uniform)
        agreed |= known[:, :-1]
        n_agreed = agreed.long().cumprod(1).sum(1, keepdim=True)
        new = torch.where(self.steps < n_agreed, torch.nn.functional.pad(guess, (0, 1)), own)
        new = torch.where((self.steps > n_agreed) | known, said, new)
        cells.bins.scatter_(1, gene, new)
        cells.hidden.copy_(hidden.gather(1, n_agreed[..., None].expand_as(cells.hidden)))
        cells.said_bin.copy_(new.gather(1, n_agreed))
        self._count(cells, known, n_agreed[:, 0])
        torch.add(start, n_agreed[:, 0] + 1, out=cells.position)
        torch.ge(cells.position, self.n_genes, out=cells.done)

    def _guesses(self, cells: GuessedCells, gene: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        ahead = gene[:, :-1]
        hidden = self.draft(cells.hidden, cells.said_bin, ahead, cache=cells.cache)
        logits = self.network.bin_logits(hidden, ahead, cells.cache)
        return self.sampling.choose(logits, uniform[:, :-1]), logits

    def _rejected(
        self, logits: Tensor, guess_logits: Tensor, guess: Tensor, *, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which guesses stay: u · q < p; and what to say instead, from what p has beyond q."""
        p, q = self.sampling.probabilities(logits), self.sampling.probabilities(guess_logits)
        of_guess = guess[..., None]
        p_guess = p[:, :-1].gather(-1, of_guess)[..., 0]
        stays = uniform[:, 1, :-1] * q.gather(-1, of_guess)[..., 0] < p_guess
        beyond = torch.cat([(p[:, :-1] - q).clamp_min(0), p[:, -1:]], dim=1)
        return stays, inverted(beyond, uniform[:, 2])

    def _count(
        self, cells: GuessedCells, known: Bool[Tensor, "cells positions"], n_agreed: Tensor
    ) -> None:
        """Guesses that were looked at, up to the first wrong one, and those that stayed."""
        n_kept = n_agreed - known[:, :-1].sum(1)
        cells.kept += n_kept
        cells.tried += n_kept + (n_agreed < self.stride - 1)

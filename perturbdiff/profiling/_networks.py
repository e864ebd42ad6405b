"""Operations of the two networks, counted by hand from their shape.

B sets (or cells of the sibling), S cells a set, R control cells, A cell axes, K latent axes,
D width, L blocks, E expansion, G genes, V bins, T positions a call, M places that are looked at.
"""

from dataclasses import dataclass

from perturbdiff.profiling._work import attention, product

_LEVELS = 32  # sines and cosines of the noise level
_KNOWN = 5  # numbers that the sibling knows of a gene beforehand


@dataclass(frozen=True, kw_only=True)
class DenoiserShape:
    """Shape of a set denoiser.

    Parameters
    ----------
    width, n_blocks, expansion
        Of the network.
    n_axes, n_latent
        Axes of control cells, and those that the diffusion runs in.
    n_controls
        Control cells that it is shown; one learned vector stands beside them.
    n_features
        Numbers that describe a perturbation.
    """

    width: int
    n_blocks: int
    expansion: int
    n_axes: int
    n_latent: int
    n_controls: int
    n_features: int = 0

    def condition(self, n_sets: float) -> float:
        """Operations that encode the condition of each set, within every call."""
        into = self.n_axes + _LEVELS + self.n_latent + 1 + self.n_features
        return product(n_sets, into, self.width) + 2 * product(n_sets, self.width, self.width)

    def block(self, n_sets: float, set_size: int) -> float:
        """Operations of one block of the noised stream.

        Queries, keys, values and output are ``4 D²`` a cell, the hidden layer ``2 E D²``, the
        modulation ``6 D²`` a set; each cell sees the S of its set and R + 1 beside it.
        """
        cells, width = n_sets * set_size, self.width
        own = product(cells, width, (4 + 2 * self.expansion) * width)
        seen = attention(cells, set_size + self.n_controls + 1, width)
        return own + seen + product(n_sets, width, 6 * width)

    def ends(self, n_sets: float, set_size: int) -> float:
        """Operations of the layers before the first and behind the last block."""
        return product(n_sets * set_size, 2 * self.n_latent + self.n_axes + 1, self.width)

    def denoise(self, n_sets: float, set_size: int) -> float:
        """Operations of one call, control cells being encoded already."""
        blocks = self.n_blocks * self.block(n_sets, set_size)
        return self.condition(n_sets) + self.ends(n_sets, set_size) + blocks

    def encode_controls(self, n_contexts: int = 1) -> float:
        """Operations that turn control cells into keys and values, once a context."""
        keys, width = self.n_controls + 1, self.width
        block = product(keys, width, (2 + 4 + 2 * self.expansion) * width)
        each = product(self.n_controls, self.n_axes, width)
        return n_contexts * (each + self.n_blocks * (block + attention(keys, keys, width)))

    def memory_numbers(self, n_sets: int) -> int:
        """Keys and values of the control cells of some sets."""
        return n_sets * self.n_blocks * 2 * (self.n_controls + 1) * self.width


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Shape of a causal decoder.

    Parameters
    ----------
    width, n_blocks, hidden, control_expansion
        Of the network.
    n_axes, n_latent, n_controls, n_features
        As in :class:`DenoiserShape`.
    n_genes, gene_width, n_bins, n_nodes
        Genes, numbers learned of each, bins of counts, counts at which a distribution is looked at.
    draws_genes
        Whether the network draws the gene that is said next.
    """

    width: int
    n_blocks: int
    hidden: int
    control_expansion: int
    n_axes: int
    n_latent: int
    n_controls: int
    n_genes: int
    gene_width: int
    n_bins: int
    n_nodes: int
    n_features: int = 0
    draws_genes: bool = False

    @property
    def identity(self) -> int:
        """Numbers that say which gene it is."""
        return self.n_axes + self.gene_width

    def block(self, n_cells: int, n_positions: int, *, seen: float) -> float:
        """Operations of one block: ``4 D²`` and the hidden layer a position, and what it sees."""
        n, width = n_cells * n_positions, self.width
        own = product(n, width, 4 * width + 2 * self.hidden)
        return own + attention(n, seen, width)

    def step(self, n_cells: int, *, n_positions: int = 1, reach: int) -> float:
        """Operations of one call of the network and its head.

        Parameters
        ----------
        n_cells
            Cells that advance together.
        n_positions
            Positions of each: 1, or one more than is guessed ahead.
        reach
            Genes that the longest cell has said behind the prefix, this call's among them.

        Returns
        -------
        Operations, those of the head among them.
        """
        n, width = n_cells * n_positions, self.width
        said = product(n, self.identity, 2 * width)
        head = product(n, width, 2 + self.n_bins) + product(n, self.n_nodes, self.n_bins)
        drawing = 0.0
        if self.draws_genes:
            query = product(n, width, self.identity + 1)
            drawing = query + product(n, self.identity, self.n_genes)
            drawing += product(n, 3, width) + product(n, width, 2 * width)
        seen = self.n_controls + 1 + reach
        blocks = self.n_blocks * self.block(n_cells, n_positions, seen=seen)
        return said + head + drawing + blocks

    def prefill(self, n_sets: int, set_size: int) -> float:
        """Operations of everything before the first gene.

        Control cells are encoded once a set; conditions once a cell; every gene of every cell is
        made a question.
        """
        cells, keys, width = n_sets * set_size, self.n_controls + 1, self.width
        block = product(keys, width, (2 + 4 + 2 * self.control_expansion) * width)
        block += attention(keys, keys, width)
        controls = product(self.n_controls, self.n_axes, width) + self.n_blocks * block
        condition = product(cells, _LEVELS + self.n_latent + 1 + self.n_features, width)
        condition += 2 * product(cells, width, width) + product(cells, self.n_axes + 1, width)
        modulation = self.n_blocks * product(cells, width, 6 * width)
        asked = product(self.n_genes, self.identity, width)
        asked += product(cells * self.n_genes, _KNOWN, width)
        summary = product(n_sets, self.n_axes, width)
        return n_sets * controls + condition + modulation + asked + summary

    def cache_numbers(self, n_cells: int) -> int:
        """Keys and values of the prefix and of every gene."""
        places = self.n_controls + 1 + self.n_genes
        return n_cells * self.n_blocks * 2 * places * self.width

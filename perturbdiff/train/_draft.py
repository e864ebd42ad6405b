"""Training the draft of speculative decoding beside a causal decoder that stands still.

B cells, T positions, G genes, V bins.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from perturbdiff._random import stream_key
from perturbdiff.autoregressive import ExpressionBins, GeneOrder, Said
from perturbdiff.data._counts import CountBatch
from perturbdiff.nn import CausalDecoder, DraftDecoder, KeyValueCache
from perturbdiff.train._causal_task import gene_inputs
from perturbdiff.train._seeding import seeded

_FARTHEST = 8
_LEARNING_RATE = 3e-3


def fit_draft(
    decoder: CausalDecoder,
    batches: Iterable[CountBatch],
    *,
    bins: ExpressionBins,
    order: GeneOrder,
    seed: int,
    n_steps: int,
) -> DraftDecoder:
    """Train a draft to say what a decoder would say of genes a few places ahead.

    Parameters
    ----------
    decoder
        What is guessed; it stays as it is.
    batches
        Cells, of which ``n_steps`` batches are used.
    bins, order
        Of the decoder; an order that is known beforehand.
    seed
        Seed of the first weights, and of how far ahead each step looks.
    n_steps
        Optimiser steps.

    Returns
    -------
    A draft for :class:`~perturbdiff.autoregressive.Speculative`.
    """
    with seeded(stream_key(seed, "draft")):
        draft = DraftDecoder(decoder.config.width, decoder.n_bins)
    draft = draft.to(decoder.axes.device)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    decline = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    trained = [p for p in decoder.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    for step, batch in zip(range(n_steps), batches, strict=False):
        with torch.no_grad():
            counts = batch.counts.flatten(0, 1)
            said = order.sequences(bins.to(counts.device).encode(counts), len(bins))
            hidden, cache = decoder(
                batch.context,
                gene_inputs(batch),
                said_gene=said.said_gene,
                said_bin=said.said_bin,
                next_gene=said.gene,
            )
        ahead = 1 + stream_key(seed, "draft", step) % min(_FARTHEST, said.gene.shape[1])
        loss = guess_loss(decoder, draft, said, hidden=hidden, cache=cache, ahead=ahead)
        real = batch.context.mask.flatten()
        optimizer.zero_grad()
        loss[real].mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        decline.step()
    for parameter in trained:
        parameter.requires_grad = True
    return draft.eval()


def guess_loss(
    decoder: CausalDecoder,
    draft: DraftDecoder,
    said: Said,
    *,
    hidden: Float[Tensor, "cells positions width"],
    cache: KeyValueCache,
    ahead: int,
) -> Float[Tensor, "cells positions"]:
    """How often a guess would be thrown away: the total variation between decoder and draft.

    Parameters
    ----------
    decoder, draft
        What is guessed, and what guesses.
    said
        Cells as sequences.
    hidden, cache
        What the decoder makes of them.
    ahead
        Places from the last gene that the draft knows about to the one that it guesses.

    Returns
    -------
    One number for each place; before the first gene the draft knows of none.
    """
    known = functional.pad(hidden[:, :-ahead], (0, 0, ahead, 0))
    known_bin = functional.pad(said.bin[:, :-ahead], (ahead, 0), value=decoder.n_bins)
    guess = draft(known, known_bin, said.gene, cache=cache)
    p = decoder.bin_logits(hidden, said.gene, cache).softmax(-1)
    q = decoder.bin_logits(guess, said.gene, cache).softmax(-1)
    return (p - q).abs().sum(-1) / 2

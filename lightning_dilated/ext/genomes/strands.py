"""OtherStrand: lets a masked language model also read a genome's reverse complement.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.ext.genomes.bases import COMPLEMENTS, backward_places, complement
from lightning_dilated.ext.genomes.scoring import MOST_GENOME_TOKENS
from lightning_dilated.models.documents import Documents
from lightning_dilated.sequence import active_sequence


class OtherStrand:
    """The reverse complement of a batch, and the complement of each of V tokens.

    Raises: ValueError for a vocabulary that is not a genome's.
    """

    def __init__(self, vocab_size: int) -> None:
        if not len(COMPLEMENTS) <= vocab_size <= MOST_GENOME_TOKENS:
            raise ValueError(
                f"strands='both' is for genomes, which have a vocab_size of 5 to {MOST_GENOME_TOKENS} (A C G T N first), "
                f"got {vocab_size}."
            )
        #: complement of each token; a token that is no base is its own complement
        self.complements = [*COMPLEMENTS, *range(len(COMPLEMENTS), vocab_size)]

    def read(self, tokens: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the reverse complement of tokens (B, N), and the source positions (B, N) of its tokens.

        Raises: ValueError if ranks share a sequence.
        """
        group = active_sequence()
        if group is not None and group.ranks > 1:
            raise ValueError(
                f"strands='both' reads sequences backwards, but {group.ranks} ranks share each sequence: set "
                "sequence_size=1 of the strategy, or strands='forward' and data.reverse_complement."
            )
        if options.get("positions") is not None:
            raise ValueError("strands='both' takes no positions: the other strand has other positions.")
        bounds, lengths = options.get("cu_seqlens"), options.get("lengths")
        if bounds is not None:
            documents = Documents.of(bounds, tokens.shape[1])
            first = documents.sizes.cumsum(0) - documents.sizes
            places = ((first + documents.sizes - 1)[documents.number] - documents.position).expand(tokens.shape)
        else:
            sizes = torch.full((len(tokens),), tokens.shape[1]) if lengths is None else torch.as_tensor(lengths)
            places = backward_places(tokens.shape[1], sizes)
        places = send(places, tokens.device)
        return complement(tokens.gather(1, places)), places

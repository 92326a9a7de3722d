"""Log-probabilities of chosen tokens, and their gradient, without a tokens × vocabulary matrix.

The unembedding of a whole batch would be the largest tensor of a pass by far. Here it is
visited a limited number of rows at a time, in both directions, and by hand: autograd would keep it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.invariant import row_sums
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.transfers import to_device


class TargetLogprobs:
    """log p(target | everything before) for M rows with K targets each.

    `values` is (M, K) float32. Rows are visited `max_rows` at a time. When there are no more than
    `max_kept_rows` their logits are kept until `backward`, which saves computing them twice;
    otherwise they are computed again.
    """

    def __init__(
        self,
        decoder: Decoder,
        hidden: Tensor,
        adapters: AdapterSegments,
        targets: Tensor,
        *,
        max_rows: int,
        max_kept_rows: int,
    ) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._adapters = adapters
        self._targets = targets
        self._max_rows = max_rows
        self._keeps = len(hidden) <= max_kept_rows
        self._kept: dict[int, Tensor] = {}
        """Logits by the first row of the visit."""

        is_plain = targets.shape[1] == 1 and decoder.config.final_softcap is None
        self._ranks = decoder.head_ranks
        self._is_fused = is_plain and kernels.are_usable(hidden) and self._ranks.count == 1
        self._is_ordered = decoder.is_invariant and kernels.are_usable(hidden)
        """Whether the kernel for sampling sums up the normalizers, leaving logits as they were."""
        self._is_capped = decoder.config.final_softcap is not None
        self._normalizers = hidden.new_empty(len(hidden), 1, dtype=torch.float32)
        self._totals = torch.ones_like(self._normalizers)
        """What kept logits must be divided by, where they were turned into unscaled
        probabilities on the way."""

        self.values = hidden.new_empty(targets.shape, dtype=torch.float32)
        with decoder.in_order():
            for start in range(0, len(hidden), max_rows):
                self._visit(start, min(start + max_rows, len(hidden)))

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient for the hidden states (M, d) from that for `values` (M, K), on the CPU.

        Rows without gradient are not visited. Gradients of adapters on the unembedding go to
        their buffers. To be called once.
        """
        hidden_grad = torch.zeros_like(self._hidden)
        wanted = grad.any(dim=1).numpy()
        grad = to_device(grad, self._hidden.device)
        for start in range(0, len(wanted), self._max_rows):
            stop = min(start + self._max_rows, len(wanted))
            rows = start + np.flatnonzero(wanted[start:stop])
            if len(rows) == stop - start:
                part = slice(start, stop)
                hidden_grad[part] = self._visit_back(start, part, rows, grad)
            elif len(rows):
                index = torch.from_numpy(rows).to(grad.device)
                hidden_grad[index] = self._visit_back(start, index, rows, grad)
            self._kept.pop(start, None)
        return hidden_grad

    def _visit(self, start: int, stop: int) -> None:
        part = slice(start, stop)
        logits = self._logits(part, self._adapters.gather(np.arange(start, stop)))
        if self._is_fused:
            scores = kernels.module("scores")
            # Where it must equal sampling's to the bit, of the dtype that is read there.
            read = logits.float() if self._decoder.is_invariant else logits
            values, normalizers = scores.target_logprobs(read, self._targets[part, 0])
            self.values[part, 0], self._normalizers[part, 0] = values, normalizers
        else:
            chosen = self._chosen(logits, self._targets[part])
            self._normalizers[part] = self._normalize(logits, part)
            self.values[part] = chosen - self._normalizers[part]
        if self._keeps:
            self._kept[start] = logits

    def _chosen(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The logits (m, K) of the targets, whichever rank has them."""
        if self._ranks.count == 1:
            return logits.gather(1, targets)
        places, is_own = self._places(targets)
        chosen = logits.gather(1, places).mul_(is_own)
        self._ranks.sum_(chosen)
        return chosen

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Where targets are among this rank's tokens, and whether they are at all."""
        cut = self._decoder.config.cut
        if cut is None or not cut.is_head_cut:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        is_own = (targets >= cut.vocab.start) & (targets < cut.vocab.stop)
        return (targets - cut.vocab.start).clamp(0, len(cut.vocab) - 1), is_own

    def _normalize(self, logits: Tensor, part: slice) -> Tensor:
        """log Σ exp(logits) of each row. Overwrites them with exp(logits − largest) if it may."""
        if self._is_ordered:
            return kernels.module("scores").normalizers(logits)[:, None]
        largest = logits.amax(dim=1, keepdim=True)
        self._ranks.max_(largest)
        shifted = logits - largest if self._is_capped else logits.sub_(largest)
        self._totals[part] = row_sums(shifted.exp_())
        self._ranks.sum_(self._totals[part])
        return largest + self._totals[part].log()

    def _visit_back(
        self, start: int, part: Tensor | slice, rows: np.ndarray, grad: Tensor
    ) -> Tensor:
        hidden, grad, targets = self._hidden[part], grad[part], self._targets[part]
        adapters = self._adapters.gather(rows)
        logits = self._kept.pop(start, None)
        is_kept = logits is not None
        if logits is None:
            logits = self._logits(part, adapters)
        elif len(logits) > len(rows):
            assert isinstance(part, Tensor), "only some rows of the visit"
            logits = logits[part - start]
        normalizers = self._normalizers[part]
        if self._is_fused:
            scores = kernels.module("scores")
            logits_grad = scores.gradient(
                logits, targets[:, 0], normalizers[:, 0], grad[:, 0], self._decoder.dtype
            )
            return self._decoder.unembed_backward(hidden, logits, logits_grad, adapters)
        # d log p(target) / d logits = [this is the target] - p; logits are overwritten if they may.
        factor = -grad.sum(dim=1, keepdim=True)
        logits_grad = logits.clone() if self._is_capped else logits
        if is_kept and not self._is_capped and not self._is_ordered:
            logits_grad.mul_(factor / self._totals[part])
        else:
            logits_grad.sub_(normalizers).exp_().mul_(factor)
        places, is_own = self._places(targets)
        logits_grad.scatter_add_(1, places, grad if self._ranks.count == 1 else grad * is_own)
        return self._decoder.unembed_backward(hidden, logits, logits_grad, adapters)

    def _logits(self, part: Tensor | slice, adapters: AdapterSegments) -> Tensor:
        if self._is_fused:
            return self._decoder.raw_logits(self._hidden[part], adapters)
        return self._decoder.own_logits(self._hidden[part], adapters)

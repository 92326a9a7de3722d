"""Log-probabilities of chosen tokens, and their gradient, without a tokens × vocabulary matrix.

The unembedding of a whole batch would be the largest tensor of a pass by far. Here it is
visited a limited number of rows at a time, in both directions, and by hand: autograd would keep it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.decoder import Decoder
from tinsmith.engine.local.lora import AdapterSegments


class TargetLogprobs:
    """log p(target | everything before) for M rows with K targets each.

    `values` is (M, K) float32. When all rows fit into `max_rows` their logits are kept until
    `backward`, which saves computing them twice; otherwise they are computed again.
    """

    def __init__(
        self,
        decoder: Decoder,
        hidden: Tensor,
        adapters: AdapterSegments,
        targets: Tensor,
        max_rows: int,
    ) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._adapters = adapters
        self._targets = targets
        self._max_rows = max_rows
        self._kept: Tensor | None = None
        self._normalizers = hidden.new_empty(len(hidden), 1, dtype=torch.float32)
        self.values = hidden.new_empty(targets.shape, dtype=torch.float32)
        for start in range(0, len(hidden), max_rows):
            rows = np.arange(start, min(start + max_rows, len(hidden)))
            self._visit(rows)

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient for the hidden states (M, d) from that for `values` (M, K).

        Rows without gradient are not visited. Gradients of adapters on the unembedding go to
        their buffers. To be called once.
        """
        hidden_grad = torch.zeros_like(self._hidden)
        wanted = grad.any(dim=1).cpu().numpy()
        for start in range(0, len(wanted), self._max_rows):
            rows = start + np.flatnonzero(wanted[start : start + self._max_rows])
            if len(rows) == len(wanted):
                hidden_grad = self._visit_back(slice(None), self._adapters, grad)
            elif len(rows):
                index = torch.from_numpy(rows).to(grad.device)
                hidden_grad[index] = self._visit_back(index, self._adapters.gather(rows), grad)
        return hidden_grad

    def _visit(self, rows: np.ndarray) -> None:
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        logits = self._decoder.unembed(self._hidden[part], self._adapters.gather(rows))
        self._normalizers[part] = logits.logsumexp(dim=1, keepdim=True)
        self.values[part] = logits.gather(1, self._targets[part]) - self._normalizers[part]
        if len(rows) == len(self._hidden):
            self._kept = logits

    def _visit_back(self, rows: Tensor | slice, adapters: AdapterSegments, grad: Tensor) -> Tensor:
        hidden, grad = self._hidden[rows], grad[rows]
        if self._kept is not None:
            logits = self._kept[rows]
            self._kept = None
        else:
            logits = self._decoder.unembed(hidden, adapters)
        # d log p(target) / d logits = [this is the target] - p; logits are overwritten if they may.
        is_capped = self._decoder.config.final_softcap is not None
        logits_grad = logits.clone() if is_capped else logits
        logits_grad.sub_(self._normalizers[rows]).exp_()
        logits_grad.mul_(-grad.sum(dim=1, keepdim=True))
        logits_grad.scatter_add_(1, self._targets[rows], grad)
        return self._decoder.unembed_backward(hidden, logits, logits_grad, adapters)

"""Attention only: a plain torch decode loop whose KV cache and attention are graphattn's."""

import torch
from own_engine import DIM, HEADS, KV_HEADS, LAYERS, Llama

from graphattn import AttentionLayer, Bounds, StepBuffers


class Decoder:
    """Greedy decoding of `rows` sequences of up to 128 tokens, a row and eight pages each."""

    def __init__(self, model: Llama, rows: int) -> None:
        self.model, self.device, self.cached = model, model.speed.device, [0] * rows
        bounds = Bounds(rows, 128, max_tokens=128 * rows, page_size=16, num_pages=8 * rows)
        spec = [AttentionLayer(HEADS, KV_HEADS, DIM, scale=DIM**-0.5)] * LAYERS
        self.buffers = StepBuffers.allocate(bounds, spec, dtype=torch.float32, device=self.device)
        self.buffers.page_table.copy_(torch.arange(8 * rows).view(rows, 8))

    def run(self, step: StepBuffers, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The device's part: the next token of each row that has places, in order."""
        step.prepare_lengths(query_len=lengths[0], context_len=lengths[1])
        return self.model(ids, step).argmax(-1)

    @torch.no_grad()
    def next_tokens(self, fresh: list[list[int]]) -> list[int | None]:
        """Feed each row a prompt, its last token, or nothing; the next token of those that were."""
        ids = torch.tensor([token for new in fresh for token in new], device=self.device)
        step = self.buffers.narrow(len(ids), mixed=max(map(len, fresh)) > 1)
        lengths = torch.tensor([[*map(len, fresh)], self.cached], device=self.device).int()
        tokens = iter(self.run(step, ids, lengths).tolist())
        self.cached = [c + len(new) for c, new in zip(self.cached, fresh, strict=True)]
        return [next(tokens) if new else None for new in fresh]


if __name__ == "__main__":
    decoder = Decoder(Llama().to("cuda" if torch.cuda.is_available() else "cpu"), rows=2)
    tokens = decoder.next_tokens([[1, 2, 3], [4]])
    while decoder.cached[0] < 16:
        print(tokens := decoder.next_tokens([[token] for token in tokens]))

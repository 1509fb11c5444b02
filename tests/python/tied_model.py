"""A language model of three stages whose output layer has the embedding's weight.

Nothing here imports rrfp.
"""

import torch

TIED = [(0, "embed.weight"), (2, "head.weight")]


class Embed(torch.nn.Module):
    def __init__(self, rows=40, columns=8):
        super().__init__()
        self.embed = torch.nn.Embedding(rows, columns)

    def forward(self, tokens):
        return self.embed(tokens)


class Head(torch.nn.Module):
    """The output layer of a language model, whose weight is the embedding's."""

    def __init__(self, rows=40, columns=8):
        super().__init__()
        self.head = torch.nn.Linear(columns, rows, bias=False)

    def forward(self, hidden):
        return self.head(hidden)


def language_model(rows=40, columns=8):
    torch.manual_seed(1)
    stages = [Embed(rows, columns), torch.nn.Linear(columns, columns), Head(rows, columns)]
    with torch.no_grad():
        stages[2].head.weight.copy_(stages[0].embed.weight)
    return stages


def tokens(rows=40, num_microbatches=6):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(rows, (2, 5), generator=generator) for _ in range(num_microbatches)]


def cross_entropy(logits, target):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

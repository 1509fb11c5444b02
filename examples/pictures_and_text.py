"""Parts of the example in vision_text.py: sums of written and pictured digits, and the stages.

A row of the batch is a few digits, some written as a token and some as a picture (scikit-learn's
8 x 8 scans of handwriting), and then a question mark; the answer is the largest of the digits.
How many pictures a microbatch has varies, and every fourth has none.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

PICTURE, QUESTION = 10, 11  # tokens beside the digits 0 to 9
LONGEST = 5  # digits in a row
TEST_PICTURES = 300
# The graph: pictures go through stages 0 and 1, tokens through 2, and both meet in 3.
EDGES = [(0, 1), (1, 3), (2, 3), (3, 4), (4, 5)]
RANK_OF_STAGE = [0, 0, 1, 1, 2, 2]
PICTURES, TOKENS, LOSS = 0, 2, 5  # the stages that are given something


class Rows:
    """Microbatches of rows; a function of the seed alone, so every rank has the same."""

    def __init__(self, num_microbatches, rows, from_test=False):
        digits = load_digits()
        part = slice(-TEST_PICTURES, None) if from_test else slice(0, -TEST_PICTURES)
        self.pictures = torch.tensor(digits.images[part] / 16.0, dtype=torch.float32)
        self.names = torch.tensor(digits.target[part])
        self.num_microbatches, self.rows = num_microbatches, rows

    def microbatch(self, generator, share):
        """(pictures or None, tokens, answers) with that share of the digits as pictures."""
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        chosen = torch.randint(len(self.names), (self.rows, length), generator=generator)
        names = self.names[chosen]
        is_picture = torch.rand(names.shape, generator=generator) < share
        question = torch.full((self.rows, 1), QUESTION)
        tokens = torch.cat([names.masked_fill(is_picture, PICTURE), question], dim=1)
        pictures = self.pictures[chosen[is_picture]] if is_picture.any() else None
        return pictures, tokens, names.amax(dim=1)

    def batch(self, step):
        """(pictures, tokens, answers, costs), each with one item per microbatch."""
        generator = torch.Generator().manual_seed(step)
        shares = [0.0 if m % 4 == 3 else 0.2 + 0.2 * (m % 4) for m in range(self.num_microbatches)]
        items = [self.microbatch(generator, share) for share in shares]
        costs = [tokens.numel() + 8 * (0 if pictures is None else len(pictures))
                 for pictures, tokens, _ in items]
        return (*map(list, zip(*items, strict=True)), costs)


class Patches(nn.Module):
    """Pictures as four patches each, and a first block on them; None stays None."""

    def __init__(self, width):
        super().__init__()
        self.project = nn.Linear(16, width)
        self.place = nn.Parameter(0.02 * torch.randn(4, width))
        self.block = Block(width)

    def forward(self, pictures):
        if pictures is None:
            return None
        patches = pictures.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(pictures), 4, 16)
        return self.block(self.project(patches) + self.place)


class Summary(nn.Module):
    """One vector for each picture."""

    def __init__(self, width):
        super().__init__()
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, patches):
        return None if patches is None else self.norm(self.block(patches).mean(dim=1))


class Tokens(nn.Module):
    """Vectors for the tokens, and where among them the pictures belong."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.place = nn.Parameter(0.02 * torch.randn(LONGEST + 1, width))

    def forward(self, tokens):
        return self.embed(tokens) + self.place[-tokens.shape[1] :], tokens == PICTURE


class Join(nn.Module):
    """Adds the pictures to the rows they belong to: an argument per edge, by source stage."""

    def __init__(self, width):
        super().__init__()
        self.block = Block(width)

    def forward(self, pictures, hidden, is_picture):
        if pictures is not None:
            hidden = hidden.index_put((is_picture,), pictures, accumulate=True)
        return self.block(hidden)


class Answer(nn.Module):
    """Scores of the ten digits, read off the question mark at the end."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, 10)

    def forward(self, hidden):
        return self.score(self.norm(hidden[:, -1]))


class Block(nn.Module):
    """A transformer block without a mask."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.MultiheadAttention(
            width, num_heads=4, batch_first=True)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, hidden):
        normed = self.norm(hidden)
        hidden = hidden + self.attend(normed, normed, normed, need_weights=False)[0]
        return hidden + self.mix(hidden)


def make_stage(index, width):
    """A stage; its weights depend on its index alone, wherever it is made."""
    torch.manual_seed(index)
    return [Patches, Summary, Tokens, Join, Block, Answer][index](width)


def run_plainly(stages, pictures, tokens):
    """The six stages in one process, one after the other."""
    hidden = stages[3](stages[1](stages[0](pictures)), *stages[2](tokens))
    return stages[5](stages[4](hidden))

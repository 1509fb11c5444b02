"""What ranks publish of themselves when they set up a pipeline, and what does not fit together."""


class RanksParted(ValueError):
    """Some ranks set up a pipeline while others wait for them in a step of an earlier one."""


# By the name that travels.
_REFUSALS = {"RanksParted": RanksParted, "TypeError": TypeError}


def check_cards(cards, shape):
    """Refuse ranks that cannot form a pipeline.

    Raises:
        ValueError, TypeError: What a rank said was wrong, or two versions.
    """
    said = [(rank, *card["error"]) for rank, card in enumerate(cards) if card.get("error")]
    if said:
        # That ranks parted comes first: for that error all of them close their pipelines.
        parted = [each for each in said if each[1] == "RanksParted"]
        told = parted[:1] + [each for each in said if each not in parted][:1]
        text = " ".join(f"rank {rank}: {text}" for rank, _, text in told)
        raise _REFUSALS.get(told[0][1], ValueError)(text)
    for name, words in (
        ("version", "versions of rrfp; install the same one everywhere"),
        ("group", "process groups of the same ranks (torch's names of them follow); pass the same "
         "one on every rank, and build pipelines in the same order"),
        *((name, f"values of {name}; pass the same one on every rank") for name in shape),
        ("agreement", "agreement groups; give one of the same size to every rank, or none"),
    ):
        for rank, card in enumerate(cards):
            if card[name] != cards[0][name]:
                raise ValueError(
                    f"the ranks have different {words}: rank 0 has {cards[0][name]!r}, rank "
                    f"{rank} has {card[name]!r}."
                )

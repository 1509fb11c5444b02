"""Writes the list of names in docs/api.md: signature and first sentence of each public name.

    python docs/api.py

A test compares the page with it.
"""

import dataclasses
import enum
import inspect
import re
import textwrap
from pathlib import Path

import rrfp

PAGE = Path(__file__).with_name("api.md")
BEGIN, END = "<!-- names: written by docs/api.py -->\n", "<!-- end of names -->"
GROUPS = {
    "A step": ("run_pipeline", "Pipeline", "StepResult", "StepReport", "RankReport"),
    "Inside a stage, and around a step": ("aux_loss", "task_rng", "clip_grad_norm_", "GradScaler"),
    "Tasks, hints, simulation": ("Task", "TaskKind", "parse_task", "HintState", "simulate",
                                 "SimulatedStep"),
    "Tasks of your own": ("Scheduler", "ScheduledTask"),
    "Errors": ("RrfpError", "StageError", "PeerLostError", "StallError", "RankTimeoutError",
               "InterruptedStepError", "ClosedError", "ProtocolError", "DeviceError", "TaskError"),
    "The installation": ("build_info",),
}


def first_sentence(thing):
    paragraph = " ".join(inspect.getdoc(thing).split("\n\n")[0].split())
    return re.match(r".*?\.(?= |$)|.*", paragraph).group().replace("``", "`")


def signature(name, function):
    """Without annotations, wrapped."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()
                  if p.name != "self"]
    text = name + str(found.replace(parameters=parameters,
                                    return_annotation=inspect.Signature.empty))
    lines = textwrap.fill(text, 96, subsequent_indent="    ", break_long_words=False,
                          break_on_hyphens=False)
    return f"```text\n{lines}\n```"


def attributes(kind):
    """What a class that rrfp alone makes has to read."""
    named = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) \
        else list(getattr(kind, "_fields", ()))
    return named + [name for name, member in vars(kind).items()
                    if isinstance(member, property) and not name.startswith("_")]


def methods(kind):
    return {name: member for name, member in vars(kind).items()
            if inspect.isfunction(member) and not name.startswith("_")}


def entry(name):
    thing, full = getattr(rrfp, name), f"rrfp.{name}"
    if inspect.isclass(thing) and issubclass(thing, rrfp.RrfpError):
        return f"- `{full}`: {first_sentence(thing)}"
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        members = ", ".join(f"`{member.name}` {member.value!r}" for member in thing)
        return f"**`{full}`**: {first_sentence(thing)} {members}."
    parts = [f"**`{full}`**: {first_sentence(thing)}"]
    if read := inspect.isclass(thing) and attributes(thing):
        parts[0] += " Attributes: " + ", ".join(f"`{attribute}`" for attribute in read) + "."
    elif name != "ScheduledTask":  # made by Scheduler.add_task
        parts.append(signature(full, thing))
    if inspect.isclass(thing) and not issubclass(thing, rrfp.GradScaler):
        parts += [f"- `.{method}`: {first_sentence(function)}\n\n" + signature(method, function)
                  for method, function in methods(thing).items()]
    return "\n\n".join(parts)


def names():
    listed = [name for group in GROUPS.values() for name in group]
    if sorted(listed) != sorted(rrfp.__all__):
        raise SystemExit(f"GROUPS and rrfp.__all__ differ: {set(listed) ^ set(rrfp.__all__)}")
    sections = []
    for title, group in GROUPS.items():
        apart = "\n" if title == "Errors" else "\n\n"
        sections.append(f"### {title}\n\n" + apart.join(map(entry, group)))
    return "\n".join(["", "\n\n".join(sections), ""])


def page(text):
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + names() + "\n" + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

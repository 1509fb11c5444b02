"""Draws late_message.svg: one rank, one hint, one late message, run twice.

Both rows are computed below from the same arrivals, by the two rules that the picture compares.
Run it after a change: python docs/img/late_message.py
"""

from pathlib import Path

HINT = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "F4", "B3", "B4"]
TICKS = {"F": 1, "B": 2}
FORWARD_ARRIVES = {0: 0, 1: 5, 2: 2, 3: 3, 4: 4}  # microbatch 1 is late: due at 1, here at 5
GRADIENT_AFTER = 2  # ticks from the end of a forward to the arrival of its gradient

UNIT, LEFT, BAR = 40, 128, 46
WIDTH, HEIGHT = 1000, 396
ROWS = {"fixed": 150, "ready": 296}
INK, SOFT, RED = "#1f2933", "#7b8794", "#d64545"
FILL = {"F": ("#cfe3f8", "#2f6fb0"), "B": ("#f9dcc0", "#b8651b")}


def run(may_overtake):
    """Task, start and end of each task, in the order run; one task at a time."""
    pending, ends, spans, now = list(HINT), {}, [], 0
    while pending:
        times = {}
        for task in pending if may_overtake else pending[:1]:
            kind, microbatch = task[0], int(task[1:])
            if kind == "F":
                times[task] = FORWARD_ARRIVES[microbatch]
            elif f"F{microbatch}" in ends:
                times[task] = ends[f"F{microbatch}"] + GRADIENT_AFTER
        ready = [task for task in times if times[task] <= now]
        if not ready:
            now = min(times.values())
            continue
        task = ready[0]  # the hint's order decides among those that are ready
        ends[task] = now + TICKS[task[0]]
        spans.append((task, now, ends[task]))
        now = ends[task]
        pending.remove(task)
    return spans


def text(x, y, words, size=15, fill=INK, anchor="start", weight="400"):
    return (f'  <text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{words}</text>')


def bars(spans, top):
    parts, last = [], 0
    for task, start, end in spans:
        x, width = LEFT + start * UNIT, (end - start) * UNIT
        if start > last:
            idle = (start - last) * UNIT
            parts.append(f'  <rect x="{LEFT + last * UNIT + 3:g}" y="{top + 1}" '
                         f'width="{idle - 6:g}" height="{BAR - 2}" rx="6" fill="url(#idle)"/>')
            if start - last > 1:
                parts.append(text(LEFT + last * UNIT + idle / 2, top + 28, "waits for F1", 14,
                                  SOFT, "middle"))
        fill, edge = FILL[task[0]]
        late = task == "F1"
        parts.append(f'  <rect x="{x + 1:g}" y="{top}" width="{width - 2:g}" height="{BAR}" '
                     f'rx="6" fill="{fill}" stroke="{RED if late else edge}" '
                     f'stroke-width="{2.5 if late else 1.2}"/>')
        parts.append(text(x + width / 2, top + 29, task, 16, RED if late else edge, "middle",
                          "600"))
        last = end
    return parts


def arrival_line():
    x = LEFT + FORWARD_ARRIVES[1] * UNIT
    due = LEFT + 1 * UNIT
    dashed = f'stroke="{RED}" stroke-width="1.5" stroke-dasharray="4 4"'
    parts = [f'  <line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" {dashed}/>'
             for top, bottom in ((112, ROWS["fixed"]), (ROWS["ready"] - 30, ROWS["ready"]))]
    return parts + [
        f'  <line x1="{due}" y1="112" x2="{due}" y2="136" stroke="{SOFT}" stroke-width="1.5"/>',
        text(due, 104, "F1 was due", 14, SOFT, "middle"),
        text(x, 104, "its message comes", 14, RED, "middle"),
    ]


def end_marks(spans, top, colour):
    end = max(span[2] for span in spans)
    x = LEFT + end * UNIT
    return [text(x + 10, top + 29, f"{end} ticks", 15, colour, "start", "600")]


def draw():
    fixed, ready = run(may_overtake=False), run(may_overtake=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="Helvetica, Arial, sans-serif">',
        "  <title>One late message under a fixed order and under readiness</title>",
        '  <defs><pattern id="idle" width="8" height="8" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="8" height="8" fill="#f5f7fa"/>'
        '<rect width="2" height="8" fill="#dde3ea"/></pattern></defs>',
        f'  <rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#ffffff"/>',
        text(28, 40, "One rank, one hint, one late message", 20, INK, "start", "600"),
        text(28, 66, "the hint: " + " &#183; ".join(HINT), 15, SOFT),
        *arrival_line(),
        text(28, ROWS["fixed"] + 20, "fixed", 16, INK, "start", "600"),
        text(28, ROWS["fixed"] + 40, "order", 16, INK, "start", "600"),
        *bars(fixed, ROWS["fixed"]),
        *end_marks(fixed, ROWS["fixed"], SOFT),
        text(LEFT, ROWS["fixed"] + BAR + 26,
             "F2 was here at tick 2, the gradient for B0 at tick 3: both stand in line behind F1.",
             14, SOFT),
        text(28, ROWS["ready"] + 20, "by", 16, INK, "start", "600"),
        text(28, ROWS["ready"] + 40, "readiness", 16, INK, "start", "600"),
        *bars(ready, ROWS["ready"]),
        *end_marks(ready, ROWS["ready"], "#2f8f5b"),
        text(LEFT, ROWS["ready"] + BAR + 26,
             "A late message delays its own task. The hint still decides among those that are "
             "ready: F1 goes first at tick 5.", 14, SOFT),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")

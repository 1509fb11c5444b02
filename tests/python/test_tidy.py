"""The repository lints itself: sizes, layers, names, memory orders, paths."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "rrfp", "tests", "examples", "benchmarks", "docs", "third_party", ".ci")
SOURCE_SUFFIXES = {".hpp", ".cc", ".cu", ".py", ".pyi", ".cmake", ".in"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".txt", ".svg", ".sh", ""}

MAY_INCLUDE = {
    "base": {"base"},
    "arbiter": {"base", "arbiter"},
    "device": {"base", "device"},
    "comm": {"base", "device", "comm"},
    "runtime": {"base", "arbiter", "device", "comm", "runtime"},
    "sim": {"base", "arbiter", "device", "comm", "runtime", "sim"},
    "python": {"base", "arbiter", "device", "comm", "runtime", "sim", "python"},
}
SAYS_NOTHING = {"utils", "util", "helper", "helpers", "manager", "common", "misc", "handler",
                "service"}


def files(*suffixes):
    found = [path for path in ROOT.iterdir()
             if path.is_file() and path.name not in ("LICENSE", ".git")]  # a worktree's .git
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = set(suffixes)
    return sorted(path for path in found if path.suffix in wanted
                  and "__pycache__" not in path.parts and "results" not in path.parts)


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def place(path, number=None):
    name = str(path.relative_to(ROOT))
    return name if number is None else f"{name}:{number}"


def cap_of(path):
    if path.suffix == ".hpp":
        return 250
    return 300 if "tests" in path.relative_to(ROOT).parts else 400


def test_files_keep_to_their_caps():
    long = [f"{place(path)}: {len(lines_of(path))} lines, at most {cap_of(path)}"
            for path in files(".hpp", ".cc", ".cu", ".py") if len(lines_of(path)) > cap_of(path)]
    assert not long, "split by noun:\n" + "\n".join(long)


def test_lines_keep_to_100_columns():
    long = [place(path, number) for path in files(*SOURCE_SUFFIXES)
            for number, line in enumerate(lines_of(path), 1) if len(line) > 100]
    assert not long, "\n".join(long)


def python_functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            documented = (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
                          and isinstance(body[0].value.value, str))
            # The cap is on what is done, not on how well it is explained.
            start = body[0].end_lineno + 1 if documented else node.lineno
            yield node.name, node.lineno, node.end_lineno - start + 1


def cpp_functions(path):
    """Definitions at column 0: from the line that opens the body to the closing brace. Members
    inside a class body are short by the cap on their header."""
    opened = None
    not_functions = re.compile(r"(namespace|class|struct|enum|union|extern|#|//|constexpr .*=)")
    for number, line in enumerate(lines_of(path), 1):
        if re.match(r"\S.*\{$", line) and not not_functions.match(line):
            opened = number
        elif line.startswith("}") and opened:
            yield lines_of(path)[opened - 1], opened, number - opened + 1
            opened = None


def test_functions_keep_to_70_lines():
    long = []
    for path in files(".py"):
        long += [f"{place(path, number)}: {name} has {count} lines"
                 for name, number, count in python_functions(path) if count > 70]
    for path in files(".cc", ".hpp", ".cu"):
        long += [f"{place(path, number)}: {name} has {count} lines"
                 for name, number, count in cpp_functions(path) if count > 70]
    assert not long, "\n".join(long)


def test_layers_include_only_those_below():
    wrong = []
    for layer, allowed in MAY_INCLUDE.items():
        for path in files(".hpp", ".cc", ".cu", ".in"):
            if (ROOT / "csrc" / layer) not in path.parents:
                continue
            for number, line in enumerate(lines_of(path), 1):
                match = re.match(r'\s*#include "(\w+)/', line)
                if match and match.group(1) not in allowed:
                    wrong.append(f"{place(path, number)}: {layer} includes {match.group(1)}")
    assert not wrong, "\n".join(wrong)


def test_core_includes_neither_torch_nor_python():
    wrong = [place(path, number) for path in files(".hpp", ".cc", ".cu")
             if (ROOT / "csrc") in path.parents and (ROOT / "csrc/python") not in path.parents
             for number, line in enumerate(lines_of(path), 1)
             if re.match(r"\s*#include [<\"](torch|ATen|c10|pybind11|Python\.h)", line)]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_the_core_is_described():
    text = (ROOT / "csrc/README.md").read_text()
    folders = {path.relative_to(ROOT / "csrc").parts[0] for path in files(".hpp", ".cc", ".cu")
               if (ROOT / "csrc") in path.parents}
    assert folders <= set(MAY_INCLUDE), "give the new layer its place in MAY_INCLUDE"
    missing = sorted(folder for folder in folders if f"`{folder}/`" not in text)
    assert not missing, f"csrc/README.md does not describe {missing}"


def test_names_say_something():
    words = [place(path) for path in files(*TEXT_SUFFIXES)
             if set(re.split(r"[_\-.]", path.stem.lower())) & SAYS_NOTHING]
    types = [f"{place(path, number)}: {match.group(1)}" for path in files(".hpp", ".cc", ".py")
             for number, line in enumerate(lines_of(path), 1)
             for match in [re.match(r"\s*(?:class|struct) (\w*(?:Manager|Helper|Handler|Util))\b",
                                    line)] if match]
    assert not words + types, "name the noun:\n" + "\n".join(words + types)


EDGE = re.compile(r"\b[A-Z]{1,2}\d+\b")


def comment_of_statement(lines, index):
    """What the comments of the statement around a line say, with those directly above it."""
    def ends(number):
        return re.search(r"[;{}:]$", lines[number].partition("//")[0].rstrip())

    first = last = index
    while first > 0 and not ends(first - 1) and lines[first - 1].strip():
        first -= 1
    if lines[first - 1].partition("//")[0].count("memory_order_relaxed") and first > 1:
        first -= 2  # one comment may speak for two relaxed accesses in a row
    while last + 1 < len(lines) and not ends(last):
        last += 1
    return " ".join(line.partition("//")[2] for line in lines[first:last + 1])


def named_edges(path):
    """Labels that the comments of a header of the file's folder explain."""
    return {label for header in path.parent.glob("*.hpp") for line in lines_of(header)
            if line.lstrip().startswith("//") for label in EDGE.findall(line)}


def test_every_memory_order_cites_an_edge_of_its_header():
    """A relaxed one, which orders nothing, may say in words why nothing is needed."""
    wrong, count = [], 0
    for path in files(".hpp", ".cc"):
        if (ROOT / "csrc") not in path.parents:
            continue
        lines, named = lines_of(path), named_edges(path)
        for index, line in enumerate(lines):
            orders = re.findall(r"memory_order_(\w+)", line.partition("//")[0])
            if not orders:
                continue
            count += 1
            comment = comment_of_statement(lines, index)
            labels = EDGE.findall(comment)
            if not comment.strip():
                wrong.append(f"{place(path, index + 1)}: says nothing about its memory order")
            elif not labels and set(orders) != {"relaxed"}:
                wrong.append(f"{place(path, index + 1)}: cites no edge")
            wrong += [f"{place(path, index + 1)}: {label} is not named by a header beside it"
                      for label in labels if label not in named]
    assert count > 0, "no memory order was found: the search is broken"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pattern", [r"/home/\w", r"/root/", r"/work\b", r"/Users/\w"])
def test_no_path_of_somebodys_machine(pattern):
    this_file = Path(__file__).resolve()
    wrong = [place(path, number) for path in files(*TEXT_SUFFIXES) if path != this_file
             for number, line in enumerate(lines_of(path), 1) if re.search(pattern, line)]
    assert not wrong, "\n".join(wrong)

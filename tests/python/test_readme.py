"""Every command and example of the pages is run by a test, every link leads somewhere, and the
picture is what its script draws."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rrfp

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("csrc/*.md"),
                *ROOT.glob("tests/*.md"), *ROOT.glob("benchmarks/*.md"),
                *ROOT.glob("third_party/*.md")])

# Command of a page -> the test that runs it: file, function. A trailing comment is not part of a
# command. `make test` is what runs this file, and .ci/run is it from a clean checkout.
COMMANDS = {
    "make test": ("test_readme.py", "test_make_names_the_files_that_the_tests_run"),
    "make train": ("test_readme.py", "test_make_names_the_files_that_the_tests_run"),
    ". .venv/bin/activate":
        ("test_readme.py", "test_make_names_the_files_that_the_tests_run"),
    "torchrun --nproc-per-node 2 examples/04_gpus.py":
        ("test_gpus_example.py", "test_on_the_cores"),
    "torchrun --nproc-per-node 4 examples/train_gpt.py":
        ("test_train_job.py", "test_four_processes"),
    "torchrun --nproc-per-node 4 examples/gpt_pipelined.py":
        ("test_gpt_scripts.py", "test_losses_are_the_same_for_200_steps"),
    "python examples/vision_text.py": ("test_vision_text.py", "test_one_process"),
    "torchrun --nproc-per-node 3 examples/vision_text.py":
        ("test_vision_text.py", "test_three_processes"),
    "torchrun --nproc-per-node 4 examples/03_data_parallel.py":
        ("test_data_parallel.py", "test_replicas_that_average_after_the_step_train_as_one"),
    **{
        command: ("test_launch.py", f"test_{name}")
        for name, start in (("torchrun", "torchrun"), ("slurm", "export"), ("slurm", "srun"),
                            ("plain_environment", "MASTER_ADDR"))
        for command in (ROOT / "docs/multi_node.md").read_text().splitlines()
        if command.startswith(f"{start} ") or command.startswith(f"{start}=")
    },
}
PYTHON_BLOCKS = {"README.md": "examples/01_quickstart.py",
                 "docs/data_parallel.md": "examples/03_data_parallel.py"}
# Pages whose blocks are run one by one.
RECIPES = {"docs/api.md": "test_api_page.py", "docs/from_pipelining.md": "test_from_pipelining.py"}
NOT_RUN = {"text", "diff"}  # languages of blocks that are drawings, or compared elsewhere


def blocks(page):
    """(language, body) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(body):
    joined = body.replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#")]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_by_a_test(page):
    for language, body in blocks(page):
        if language in NOT_RUN:
            continue
        if language == "python" and name_of(page) in RECIPES:
            continue
        if language == "python":
            source = PYTHON_BLOCKS.get(name_of(page))
            assert source, f"{name_of(page)} has a Python block that no test runs:\n{body}"
            assert body == (ROOT / source).read_text(), f"the block and {source} differ"
            continue
        assert language == "sh", f"{name_of(page)}: a block of language {language!r}:\n{body}"
        for command in commands(body):
            assert command in COMMANDS, f"{name_of(page)}: no test runs: {command}"
            file, function = COMMANDS[command]
            assert f"def {function}(" in (ROOT / "tests/python" / file).read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", prose):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    missing = [page.name for page in ROOT.glob("docs/*.md") if f"](docs/{page.name})" not in text]
    assert not missing, f"no link to {missing}"


def test_every_error_is_explained():
    text = (ROOT / "docs/errors.md").read_text()
    errors = [name for name in rrfp.__all__ if name.endswith("Error")]
    assert [n for n in errors if n != "RrfpError" and f"| `{n}` |" not in text] == []


def test_every_column_of_the_report_is_explained():
    text = (ROOT / "docs/concepts.md").read_text()
    columns = re.split(r" {2,}", str(rrfp.StepReport(())).splitlines()[0].strip())
    assert columns[0] == "rank" and len(columns) > 10
    assert [name for name in columns[1:] if f"\n| {name} | " not in text] == []


def test_make_alone_says_what_there_is():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    for target in set(targets.split()) - {"help"}:
        assert re.search(rf"^make {target}\b", done.stdout, re.MULTILINE), done.stdout
    assert "pip" not in done.stdout


def test_quickstart_learns():
    done = subprocess.run([sys.executable, str(ROOT / "examples/01_quickstart.py")],
                          capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step \d+: loss (\S+), (\d+)% right$", done.stdout, re.MULTILINE)
    losses, right = zip(*((float(loss), int(percent)) for loss, percent in found))
    assert len(losses) == 40
    assert losses[0] > 2 and losses[-1] < 0.5, "not visibly learnt, or nothing to learn"
    assert right[0] < 30 and right[-1] > 80


def test_quickstart_is_short_enough_to_read_at_a_glance():
    code = [line for line in (ROOT / "examples/01_quickstart.py").read_text().splitlines()
            if line.strip()]
    assert len(code) <= 21


def test_make_names_the_files_that_the_tests_run():
    """`make train` starts the script that test_train_job.py runs, in both modes, and `make test`
    this suite; running either from here would build an environment inside a test."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^train: build\n(?:\t.*\n)*\t\$\(PY\) examples/train_gpt\.py --ranks 4",
                     makefile, re.MULTILINE)
    assert re.search(r"^\t\$\(PY\) -m torch\.distributed\.run .*--nproc-per-node 4 "
                     r"examples/train_gpt\.py", makefile, re.MULTILINE)
    assert re.search(r"^test: .*build\n\t@?\$\(PY\) -m pytest", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert re.search(r"^VENV := \.venv$", makefile, re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    for variable in re.findall(r"`make (?:train|test) ([A-Z_]+)=", readme):
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE)


def test_picture_is_what_its_script_draws():
    script = runpy.run_path(str(ROOT / "docs/img/late_message.py"))
    assert script["draw"]() == (ROOT / "docs/img/late_message.svg").read_text()


def test_picture_is_a_possible_execution():
    """Both rows hold every task once, in no task before its inputs, and the fixed one in the
    hint's order."""
    script = runpy.run_path(str(ROOT / "docs/img/late_message.py"))
    for may_overtake in (False, True):
        spans = script["run"](may_overtake)
        ends = {task: end for task, _, end in spans}
        assert sorted(ends) == sorted(script["HINT"])
        for task, start, end in spans:
            microbatch = int(task[1:])
            needed = (script["FORWARD_ARRIVES"][microbatch] if task[0] == "F"
                      else ends[f"F{microbatch}"] + script["GRADIENT_AFTER"])
            assert start >= needed and end - start == script["TICKS"][task[0]]
        if not may_overtake:
            assert [task for task, _, _ in spans] == script["HINT"]


def test_measured_figures_are_what_the_result_files_say():
    script = runpy.run_path(str(ROOT / "docs/measured.py"))
    for name, section in script["PAGES"].items():
        text = (ROOT / name).read_text()
        assert script["page"](text, section()) == text, f"{name}; run: python docs/measured.py"


def test_every_result_file_is_described():
    """With its command, its card or processor, and its commit, where the file is not a function
    of code and seeds."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    for file in sorted((ROOT / "benchmarks/results").iterdir()):
        section = next((part for part in re.split(r"^## ", page, flags=re.MULTILINE)
                        if f"[{file.name}](" in part), None)
        assert section, f"{file.name} is not described; add it to ABOUT in docs/measured.py"
        source = section[section.rindex("\n("):]
        if file.name in ("policy_table.json", "step_draws.jsonl"):
            assert "A function of the code and the seeds" in section
            continue
        assert re.search(r"\bcores\b", source) and "commit" in source and "torch" in source or (
            file.name == "gpu_messages_h100.json" and "NCCL" in source), source
        assert "`" in source or "command" in section, f"no command for {file.name}"

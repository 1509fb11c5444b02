"""``rrfp.Scheduler``: tasks of one's own over the same arbiter.

Would catch: a task that runs twice, too early or never, an order that is not the hint's, a thread
that is lost or left behind after an error, a circle that becomes a hang.
"""

import doctest
import os
import random
import threading

import pytest
import torch

import rrfp
import rrfp.scheduler

SEED = int(os.environ.get("RRFP_SEED", "20260518"))


def expected_order(after, order, slack):
    """One thread: always the first ready task of the order that overtakes at most ``slack``."""
    left, began = list(order), []
    while left:
        for place, index in enumerate(order):
            first = order.index(left[0])
            if index in left and all(b in began for b in after[index]):
                if slack is None or place - first <= slack:
                    left.remove(index)
                    began.append(index)
                    break
        else:
            raise AssertionError("nothing can run")
    return began


@pytest.mark.parametrize("slack", [None, 0, 2])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_random_graphs(slack, num_threads):
    for seed in range(SEED, SEED + 40):
        rng = random.Random(seed)
        count = rng.randint(1, 25)
        after = [[b for b in range(i) if rng.random() < 0.15] for i in range(count)]
        scheduler = rrfp.Scheduler(num_threads=num_threads, slack=slack)
        has_run, lock = [], threading.Lock()

        def body(index):
            with lock:
                assert set(after[index]) <= set(has_run), f"seed {seed}: {index} ran too early"
                assert index not in has_run
                has_run.append(index)
            return index * index

        tasks = []
        for i in range(count):
            tasks.append(scheduler.add_task(lambda i=i: body(i), [tasks[b] for b in after[i]]))
        order = list(range(count))
        if slack is None:
            rng.shuffle(order)
        for _ in range(2):  # a scheduler can run again
            has_run.clear()
            began = scheduler.run([tasks[i] for i in order])
            assert sorted(has_run) == list(range(count))
            assert [task.result for task in tasks] == [i * i for i in range(count)]
            for task in tasks:
                assert task.ready_ns <= task.started_ns <= task.ended_ns
            if num_threads == 1:
                assert [t.index for t in began] == expected_order(after, order, slack), seed


def test_tasks_run_side_by_side():
    meeting = threading.Barrier(3, timeout=20)
    scheduler = rrfp.Scheduler(num_threads=3)
    for _ in range(3):
        scheduler.add_task(meeting.wait)
    assert len(scheduler.run()) == 3
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("rrfp-task") for name in names)


def test_names_may_be_of_tasks_that_come_later():
    scheduler = rrfp.Scheduler()
    scheduler.add_task(lambda: None, after=["b"], name="a")
    scheduler.add_task(lambda: None, name="b")
    assert [task.name for task in scheduler.run()] == ["b", "a"]
    assert scheduler.run(order=iter(["b", "a"]))[0].name == "b"
    with pytest.raises(ValueError, match="'c', which is no task"):
        scheduler.run(order=["b", "c"])


def test_circles_and_other_mistakes_are_refused_before_anything_runs():
    ran = []
    scheduler = rrfp.Scheduler(slack=1)
    scheduler.add_task(lambda: ran.append(0), name="start")
    scheduler.add_task(lambda: ran.append(1), after=["c", "start"], name="a")
    scheduler.add_task(lambda: ran.append(2), after=["a"], name="b")
    scheduler.add_task(lambda: ran.append(3), after=["b"], name="c")
    with pytest.raises(ValueError, match="'a' after 'c' after 'b' after 'a'"):
        scheduler.run()
    for after, words in ((["nobody"], "'d' runs after 'nobody'"), (["d"], "'d' runs after itself")):
        bad = rrfp.Scheduler()
        bad.add_task(lambda: ran.append(4), after=after, name="d")
        with pytest.raises(ValueError, match=words):
            bad.run()
    late = rrfp.Scheduler(slack=0)
    late.add_task(lambda: ran.append(5), after=["second"], name="first")
    late.add_task(lambda: ran.append(6), name="second")
    with pytest.raises(ValueError, match="'first' stands before 'second'.*slack 0"):
        late.run()
    with pytest.raises(ValueError, match="lists 'first' 2 times"):
        late.run(order=["first", "second", "first"])
    with pytest.raises(ValueError, match="lists 'second' 0 times"):
        late.run(order=["first"])
    assert not ran
    late.run(order=["second", "first"])
    assert ran == [6, 5]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fn": 3}, TypeError, "fn is a int"),
        ({"after": "a"}, TypeError, "after is 'a'"),
        ({"after": [3]}, TypeError, "after lists 3"),
        ({"after": [rrfp.Scheduler().add_task(print)]}, ValueError, "another scheduler"),
        ({"stream": 7}, TypeError, "torch.cuda.Stream"),
        ({"name": 7}, TypeError, "name is 7"),
        ({"name": "taken"}, ValueError, "'taken'"),
    ],
)
def test_wrong_tasks(arguments, error, words):
    scheduler = rrfp.Scheduler()
    scheduler.add_task(print, name="taken")
    with pytest.raises(error, match=words):
        scheduler.add_task(**{"fn": print, **arguments})
    for options in ({"num_threads": 0}, {"slack": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            rrfp.Scheduler(**options)
    with pytest.raises(TypeError, match="num_threads"):
        rrfp.Scheduler(num_threads=True)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_exception_ends_the_run(num_threads):
    scheduler, ran = rrfp.Scheduler(num_threads=num_threads), []
    for i in range(20):
        scheduler.add_task(lambda i=i: ran.append(i))

    def fail():
        raise KeyError("broken on purpose")

    bad = scheduler.add_task(fail, name="bad")
    scheduler.add_task(lambda: ran.append("never"), after=[bad])
    with pytest.raises(rrfp.TaskError, match="bad raised KeyError: 'broken on purpose'") as caught:
        scheduler.run()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.task == "bad"
    assert "never" not in ran
    assert not any(thread.name.startswith("rrfp-task") for thread in threading.enumerate())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_interrupt_is_not_dressed_up(num_threads):
    scheduler = rrfp.Scheduler(num_threads=num_threads)

    def interrupt():
        raise KeyboardInterrupt

    first = scheduler.add_task(interrupt)
    scheduler.add_task(lambda: None, after=[first])
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_callbacks_come_before_their_task(num_threads):
    scheduler, told = rrfp.Scheduler(num_threads=num_threads), []
    scheduler.on_ready(lambda task: told.append((task.name, threading.get_ident())))
    threads = {}

    def body(name):
        assert name in [told_name for told_name, _ in told]
        threads[name] = threading.get_ident()

    first = scheduler.add_task(lambda: body("first"), name="first")
    for i in range(6):
        scheduler.add_task(lambda i=i: body(f"next {i}"), after=[first], name=f"next {i}")
    scheduler.run()
    assert [name for name, _ in told] == ["first", *(f"next {i}" for i in range(6))]
    assert {ident for _, ident in told[1:]} == {threads["first"]}
    scheduler.on_ready(lambda task: 1 / 0)
    with pytest.raises(rrfp.TaskError, match="on_ready for first raised ZeroDivisionError"):
        scheduler.run()


def test_it_cannot_be_changed_while_it_runs():
    scheduler = rrfp.Scheduler()
    scheduler.add_task(lambda: scheduler.add_task(print))
    with pytest.raises(rrfp.TaskError, match="add_task was called while the scheduler runs"):
        scheduler.run()
    assert rrfp.Scheduler().run() == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_tasks_have_the_modes_of_the_caller(num_threads):
    scheduler, seen, meeting = rrfp.Scheduler(num_threads), [], threading.Barrier(num_threads)

    def look():
        meeting.wait(20)
        product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        seen.append((torch.is_grad_enabled(), product.dtype, torch.empty(0).device.type))

    for _ in range(num_threads):
        scheduler.add_task(look)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        scheduler.run()
    assert seen == [(False, torch.bfloat16, "meta")] * num_threads


def test_the_example_of_the_docstring():
    assert doctest.testmod(rrfp.scheduler).failed == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_wait_for_what_they_run_after():
    """A long product on one stream, read on another, then on the caller's."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for size in (512, 4096):
        torch.manual_seed(size)
        weight = torch.randn(size, size, device="cuda") / size**0.5
        value = {}

        def long():
            x = weight
            for _ in range(30):
                x = x @ weight
            value["x"] = x

        scheduler = rrfp.Scheduler(num_threads=2)
        first = scheduler.add_task(long, stream=one)
        second = scheduler.add_task(lambda: value["x"].sum(), after=[first], stream=two)
        third = scheduler.add_task(lambda: second.result + 1, after=[second])
        scheduler.run()
        total = third.result + 0  # on the caller's stream
        torch.cuda.synchronize()
        torch.testing.assert_close(total, value["x"].sum() + 1)

"""What tracing changes in a process for its time is as it was afterwards, whoever else traces meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from weightsync.undisturbed import inline_thread_pools


def where(pool: ThreadPoolExecutor) -> int:
    return pool.submit(threading.get_ident).result()


def test_only_the_thread_that_traces_runs_work_of_pools_itself():
    with ThreadPoolExecutor(1) as pool:
        there = where(pool)
        with inline_thread_pools():
            assert where(pool) == threading.get_ident()
            others: list[int] = []
            other = threading.Thread(target=lambda: others.append(where(pool)))
            other.start()
            other.join()
        assert others == [there]


def test_pools_are_as_before_when_two_threads_have_traced_at_once():
    submit = ThreadPoolExecutor.submit
    first_is_in, second_may_wait = threading.Event(), threading.Event()

    def first() -> None:
        with inline_thread_pools():
            first_is_in.set()
            second_may_wait.wait(0.5)  # the second tries to come in meanwhile

    def second() -> None:
        first_is_in.wait(5)
        with inline_thread_pools():
            second_may_wait.set()
            thread.join(2)  # the first one leaves before, if it could come in beside it

    thread = threading.Thread(target=first)
    thread.start()
    second()
    thread.join()
    assert ThreadPoolExecutor.submit is submit

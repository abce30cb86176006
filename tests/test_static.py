"""Static batching: full batches at once, partial ones after the timeout, results together, and nobody waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import kill_when, wait_for

from enginepool import Output, Pool, SamplingParams


def test_closed_loop_of_fewer_callers_than_the_batch_finishes() -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, batch_size=32, batch_timeout_s=0.02) as pool:

        def caller(index: int) -> list[Output]:
            return [pool.generate(f"caller {index} call {call}", SamplingParams(max_tokens=5)) for call in range(10)]

        with ThreadPoolExecutor(20) as executor:
            outputs = [output for mine in executor.map(caller, range(20)) for output in mine]
    assert len(outputs) == 200
    assert all(output.ok for output in outputs)


def test_results_of_a_batch_leave_together() -> None:
    with Pool(engine="echo", workers=1, step_s=0.002, batch_size=4, batch_timeout_s=30.0) as pool:
        params = [SamplingParams(max_tokens=tokens) for tokens in (1, 20, 40, 80)]
        outputs = pool.generate_many(["a", "b", "c", "d"], params)
    delivered = [output.timings.delivered or 0 for output in outputs]
    finished = [output.timings.finished or 0 for output in outputs]
    assert min(delivered) >= max(finished)
    assert finished == sorted(finished)
    assert finished[0] < finished[3]


def test_one_batch_at_a_time_per_worker() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, batch_size=2, batch_timeout_s=0.01) as pool:
        outputs = pool.generate_many([f"item {index}" for index in range(8)], SamplingParams(max_tokens=10))
    starts = sorted({output.timings.leased for output in outputs if output.timings.leased})
    ends = sorted(output.timings.finished or 0 for output in outputs)
    assert len(starts) == 4
    assert all(start >= ends[2 * batch - 1] for batch, start in enumerate(starts) if batch)


def test_drain_flushes_a_partial_batch() -> None:
    pool = Pool(engine="echo", workers=1, batch_size=32, batch_timeout_s=60.0)
    with Pool.connect(pool.endpoint) as other:
        future = other.submit("alone", SamplingParams(max_tokens=5))
        wait_for(lambda: pool.status().backlog == 1, "the item to wait")
        from enginepool.protocol import Drain

        pool._connection.post(Drain())
        assert future.result(timeout=20).ok
    pool.close()


def test_cancel_in_a_batch_leaves_its_neighbours() -> None:
    with Pool(engine="echo", workers=1, step_s=0.002, batch_size=3, batch_timeout_s=0.01) as pool:
        doomed = pool.submit("doomed", SamplingParams(max_tokens=10_000_000))
        others = [pool.submit(f"other {index}", SamplingParams(max_tokens=20)) for index in range(2)]
        wait_for(lambda: pool.status().in_flight == 3, "the batch")
        doomed.cancel()
        assert all(other.result(timeout=20).ok for other in others)


def test_deadline_in_a_batch_frees_the_rest() -> None:
    with Pool(engine="echo", workers=1, step_s=0.002, batch_size=2, batch_timeout_s=0.01) as pool:
        late = pool.submit("late", SamplingParams(max_tokens=10_000_000), deadline_s=0.3)
        other = pool.submit("other", SamplingParams(max_tokens=20))
        assert other.result(timeout=20).ok
        assert late.result(timeout=20).error is not None


def test_worker_killed_with_a_batch_loses_nothing() -> None:
    with Pool(engine="echo", workers=2, step_s=0.002, batch_size=8) as pool:
        victim = pool.status().workers[0].pid
        assert victim is not None
        killer = kill_when(lambda: pool.status().in_flight > 8, "two batches", victim)
        outputs = pool.generate_many([f"item {index}" for index in range(64)], SamplingParams(max_tokens=40))
        killer.join()
    assert all(output.ok for output in outputs)
    assert [output.prompt for output in outputs] == [f"item {index}" for index in range(64)]


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"batch_size": 4, "batch_timeout_s": 0.0}, {"batch_timeout_s": 1.0}])
def test_settings_without_meaning_are_refused(settings: dict[str, float]) -> None:
    from enginepool import SettingsError

    with pytest.raises(SettingsError, match="batch"):
        Pool(engine="echo", **settings)  # type: ignore[arg-type]
